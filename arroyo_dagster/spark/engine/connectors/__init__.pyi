from .binding import SparkSource as SparkSource
from .kafka import KafkaSink as KafkaSink
from .sink import SparkSink as SparkSink
