"""Pictures and videos as the vision tower takes them: sizes, patches, sampled frames."""
