"""The test kit: a fake device, the plain answer, random scenarios, and a ready engine. No torch."""
