"""`arroyo-state sdf`: definitions, services and states of SDF dataflows, and tests of packages."""
