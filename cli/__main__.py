"""`python -m k3quant.cli` is the `k3quant` command."""

from k3quant.cli.main import main

main()
