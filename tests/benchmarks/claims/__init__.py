"""The field's claims, reproduced on this machine: `make claims`. One file per claim."""
