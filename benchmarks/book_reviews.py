"""What a classifier of the book reviews is held against: the majority class, and a logistic
regression on character n-grams.

    python benchmarks/book_reviews.py /data/book_review

Needs scikit-learn. The classifier itself: ``python -m llmx experiment=book_reviews``.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np


def rows(path: Path) -> tuple[list[str], np.ndarray]:
    """Texts and labels of a file."""
    with path.open(encoding="utf-8", newline="") as stream:
        found = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["text_a"] for row in found], np.array([int(row["label"]) for row in found])


def main(directory: Path) -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    texts, labels = rows(directory / "train.tsv")
    vectorizer = TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2, sublinear_tf=True)
    model = LogisticRegression(C=4.0, max_iter=1000)
    model.fit(vectorizer.fit_transform(texts), labels)
    majority = np.bincount(labels).argmax()
    for name in ("dev", "test"):
        held_out, wanted = rows(directory / f"{name}.tsv")
        scores = model.predict_proba(vectorizer.transform(held_out))[:, 1]
        predicted = scores > 0.5
        print(
            f"{name}: {len(wanted):,} rows; majority class {np.mean(wanted == majority):.1%}; "
            f"logistic regression accuracy {accuracy_score(wanted, predicted):.1%}, macro F1 "
            f"{f1_score(wanted, predicted, average='macro'):.1%}, "
            f"ROC AUC {roc_auc_score(wanted, scores):.1%}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
