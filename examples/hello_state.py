"""From nothing to a row of state: python examples/hello_state.py [URL]"""
import datetime as dt
import sys

import pyarrow as pa

import arroyo_dagster as ad


class CountWords(ad.Operator):
    def tables(self): return [ad.global_table_config("counts", key=str, value=int)]
    def process_batch(self, batch, ctx, collector):
        counts = ctx.table_manager.get_global_keyed_state("counts", str, int)
        for word in batch["word"].to_pylist(): counts.insert(word, counts.get(word, 0) + 1)

words = pa.table({"word": ["to", "be", "or", "not", "to", "be"], "at": [dt.datetime(2024, 1, 1)] * 6})
hello = ad.Pipeline("hello")
hello.source("words", ad.TableSource(words, rows_per_epoch=3), timestamp="at").key_by("word").apply("count", CountWords())
if __name__ == "__main__":
    ad.run_pipeline(hello, ad.open_store(url := sys.argv[1] if sys.argv[1:] else "/tmp/hello-state"))
    print(f"arroyo-state rows main count counts --url {url}")
