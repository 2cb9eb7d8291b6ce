"""What all unit tests share."""

from hypothesis import settings

# How long an example takes says more about the machine's load than about the code.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
