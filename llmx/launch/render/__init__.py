"""What is about to be run, as files: ``hostfile``, ``ssh_config``, ``ds_env``, ``command.txt``."""
