"""Why a training failed: the catalogue of known failures, and how a log is matched against it.

``catalogue`` has the rows (data), ``log`` finds the errors in a text and drops what is harmless,
``diagnose`` selects the cause. Pure, without torch. Used by the supervisor for each attempt
(``llmx.launch``) and by ``python -m llmx explain LOG``. ``make site`` makes a page of it.
"""
