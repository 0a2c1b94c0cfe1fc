"""From files and Hub datasets to records, each with its place; which records a split has."""
