"""Converts anything to sharded TFRecords: `tfdml records convert`, for those who look here.

python tools/convert_tfrecord.py photos/ --output data/photos
"""

import typer

from tfdml.cli.records_convert import convert

if __name__ == "__main__":
    typer.run(convert)
