"""Programs that tests start as ranks with the real ``deepspeed``."""
