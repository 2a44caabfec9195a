"""Settings of presets that `settings.py` measures: a page for each study."""
