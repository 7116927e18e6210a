"""Settings: what can be set (sections), and loading it from file, environment and flags (load)."""

from tiered.settings.load import LoadedSettings as LoadedSettings
from tiered.settings.load import load_settings as load_settings
from tiered.settings.sections import OffloadSettings as OffloadSettings
from tiered.settings.sections import Settings as Settings
