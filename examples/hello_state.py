# From nothing to a row of state. Then: arroyo-state rows main count counts --url /tmp/hello-state
import pyarrow as pa

import arroyo_dagster as ad


class Count(ad.Operator):
    def tables(self):
        return [ad.global_table_config("counts", key=str, value=int)]

    def process_batch(self, batch, ctx, collector):
        counts = ctx.table_manager.get_global_keyed_state("counts", str, int)
        counts.merge(batch["word"], None, "count")


words = pa.table({"word": ["to", "be", "to"], "at": pa.array([1, 2, 3], pa.timestamp("s"))})
rows = ad.Pipeline("hello").source("words", ad.TableSource(words, rows_per_epoch=2), timestamp="at")
rows.key_by("word").apply("count", Count())
ad.run_pipeline(rows.pipeline, ad.open_store("/tmp/hello-state"))
