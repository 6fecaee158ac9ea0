"""How ranks agree, and how those of one host share its CPUs."""
