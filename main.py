"""`torchrun main.py --config run.yaml --mode train --algorithm sft`: as job scripts start such a file; it is
`megaswift train`."""

from megaswift.train import main

if __name__ == "__main__":
    raise SystemExit(main())
