"""The commands of `arroyo-state fleet`: about all jobs at once. They write nothing."""
