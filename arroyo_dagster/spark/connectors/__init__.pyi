from .kafka import KafkaSink as KafkaSink
from .sink import SparkSink as SparkSink
from .source import SparkSource as SparkSource
