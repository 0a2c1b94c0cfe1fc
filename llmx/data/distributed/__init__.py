"""Several hosts prepare one dataset, or one does and sends it."""
