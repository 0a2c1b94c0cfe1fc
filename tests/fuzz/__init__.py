"""Random command lines, config files and hostfiles through the whole command line, in process.

    python -m tests.fuzz --count 2000 --seed 7      # the table, and every case that fails
    python -m tests.fuzz --case 7:1234              # one of them again
    python -m tests.fuzz --after --count 2000       # commands after training, on damaged runs

Nothing is launched: every case plans, or prints.
"""
