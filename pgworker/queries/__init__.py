"""The statements, one file each; pgworker.statements reads them."""
