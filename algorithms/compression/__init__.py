"""Codecs: fewer bytes on the wire, and error feedback, so that training does not notice.

A codec turns float32 values into bytes and back. `Cast` rounds them to 16 or 8 bits;
`ErrorFeedback` wraps another codec and adds what rounding took away to the next values. Collectives
take a codec, or its name, as ``compression=``.
"""

from pycomm.algorithms.compression.cast import Cast
from pycomm.algorithms.compression.codec import Codec, as_codec, from_dict
from pycomm.algorithms.compression.feedback import ErrorFeedback

__all__ = ["Cast", "Codec", "ErrorFeedback", "as_codec", "from_dict"]
