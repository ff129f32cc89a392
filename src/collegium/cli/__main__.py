"""`python -m collegium.cli` is the command line where the script `collegium` is not on the path."""

from collegium.cli import main

if __name__ == "__main__":
    main()
