"""From files and Hub datasets to records, each with its place: what is read before anything else."""
