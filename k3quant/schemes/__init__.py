"""How each ecosystem spells a number format: names, shapes and config sections."""
