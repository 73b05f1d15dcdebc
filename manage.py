#!/usr/bin/env python
"""Django's command line: `serve` runs everything, `createkey` makes an API key."""

import sys

from config.command_line import main

if __name__ == "__main__":
    main(sys.argv)
