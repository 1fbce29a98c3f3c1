from .codec import Codec as Codec
from .codec import codec_for as codec_for
