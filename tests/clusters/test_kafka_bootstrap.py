"""A bootstrap from a topic on a real broker: its events end where the job continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.kafka import answer_of, kafka_broker
from tests.surgery_demo import CUT

pytestmark = pytest.mark.clusters

APPLICATION = """
import json, sys, time
from arroyo_dagster.errors import InputError
from arroyo_dagster.spark.session import open_session
from arroyo_dagster.spark.settings import SparkSettings
from arroyo_dagster.spark.surgery.declared import declared_bootstrap
from arroyo_dagster.state import open_store
from arroyo_dagster.state.codec.iso_times import iso_micros
from arroyo_dagster.state.model.layout import Layout
from arroyo_dagster.state.operations.surgery.declared import parse_declared_bootstrap
from arroyo_dagster.state.operations.surgery.execute import EditOptions
from tests.arroyo_jobs import stopped
from tests.compat.test_surgery import positions
from tests.evolved_jobs import Sql, loaded, sql_job
from tests.journeys.test_surgery import errors_of
from tests.surgery_demo import CUT, ORDERS, truth_of_orders

servers, folder, ivy, connector = sys.argv[1:]
conf = {"spark.jars.ivy": ivy, "spark.sql.shuffle.partitions": "2"}
packages = (connector,)
session = open_session(SparkSettings(master="local[2]", packages=packages, conf=conf)).session


def produce(orders, topic="orders"):
    rows = [(json.dumps(one).encode(), one["kafka_partition"]) for one in orders]
    frame = session.createDataFrame(rows, "value binary, partition int").coalesce(1)
    options = {"kafka.bootstrap.servers": servers, "topic": topic}
    frame.write.format("kafka").options(**options).save()


def member(name):
    return f"get_json_object(cast(value as string), '$.{name}')"


def declared(topic="orders", **cut):
    events = {
        "format": "kafka",
        "options": {"kafka.bootstrap.servers": servers, "subscribe": topic},
        "time": "ordered_at",
        "select": {
            "k": member("k"),
            "v": f"cast({member('v')} as bigint)",
            "item": member("item"),
            "price": f"cast({member('price')} as bigint)",
            "ordered_at": f"timestamp_seconds(cast({member('ordered_at')} as bigint))",
        },
    }
    if "until" in cut:
        events["until"] = cut.pop("until")
    tables = {
        "tumbling_4": {"t": {}},
        "updating_aggregate_7": {"a": {}, "b": {"distinct": {1: "v"}}},
        "join_11": {"left": {"where": "price >= 20"}},
    }
    return parse_declared_bootstrap(
        {"events": events, "lateness_seconds": 5, "tables": tables, **cut}
    )


def bootstrapped(name, document, meanwhile):
    made = sql_job(Layout.LEGACY, name, Sql(sign=128))
    store = open_store(f"{folder}/{name}")
    for info in made.store.list():
        store.put(info.path, made.store.read(info.path))
    paths = made.paths
    with declared_bootstrap(session, store, paths, stopped(paths), document) as bootstrap:
        plan = bootstrap.plan()
    produce(meanwhile)
    with declared_bootstrap(session, store, paths, stopped(paths), document) as bootstrap:
        outcome = bootstrap.run(plan, EditOptions(quiet_seconds=0))
    rows, truth = loaded(store, paths), truth_of_orders()
    return {
        "missing": [one for one in plan.missing_outputs if one.startswith("events: ")],
        "published": outcome.published,
        "equal": [len(rows[key]) for key in truth if rows[key] == truth[key]],
        "positions": {at: positions(store, paths)["source_orders_0", at] for at in "01"},
        "errors": sorted(errors_of(store, paths)),
    }


def refused(document):
    made = sql_job(Layout.LEGACY, "job_r", Sql(sign=128))
    try:
        with declared_bootstrap(
            session, made.store, made.paths, stopped(made.paths), document
        ):
            return None
    except InputError as error:
        return str(error)


late = [one for one in ORDERS if one["kafka_offset"] >= CUT[one["kafka_partition"]]]
produce([one for one in ORDERS if one not in late])
time.sleep(0.05)
until = iso_micros(time.time_ns() // 1000)
time.sleep(0.05)
produce(late[:10])
found = {
    "until": bootstrapped("job_u", declared(until=until), late[10:15]),
    "positions": bootstrapped("job_p", declared(positions={"0": CUT[0], "1": CUT[1]}), late[15:]),
    "one partition": refused(declared(positions={"0": 1})),
    "not reached": refused(declared(positions={"0": 1, "1": 1000})),
    "no topic": refused(declared("none", until=until)),
}
jvm, gateway = session._jvm, session.sparkContext._gateway
settings = jvm.java.util.Properties()
settings.put("bootstrap.servers", servers)
admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(settings)
# py4j passes an int, and takes no method with a long for it.
kinds, three = gateway.new_array(jvm.java.lang.Class, 1), gateway.new_array(jvm.java.lang.Object, 1)
kinds[0], three[0] = jvm.java.lang.Long.TYPE, 3
loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
expired = loader.loadClass("org.apache.kafka.clients.admin.RecordsToDelete")
before = expired.getMethod("beforeOffset", kinds).invoke(None, three)
partition = jvm.org.apache.kafka.common.TopicPartition("orders", 0)
admin.deleteRecords(jvm.java.util.Collections.singletonMap(partition, before)).all().get()
admin.close()
made = sql_job(Layout.LEGACY, "job_d", Sql(sign=128))
document = declared(positions={"0": CUT[0], "1": CUT[1]})
with declared_bootstrap(session, made.store, made.paths, stopped(made.paths), document) as late:
    found["deleted"] = late.plan().missing_outputs[0]
print(json.dumps(found))
session.stop()
"""


def test_the_events_of_a_topic_end_where_the_job_continues(tmp_path: Path) -> None:
    with kafka_broker(tmp_path) as servers:
        found = answer_of(APPLICATION, tmp_path, servers)
    for cut in ("until", "positions"):
        done = found[cut]
        assert done["published"]
        assert (len(done["equal"]), min(done["equal"]) > 5) == (4, True), done
        assert done["positions"] == {str(at): offset for at, offset in CUT.items()}
        assert done["errors"] == []
        assert done["missing"] == []
    assert "the topic has the partitions 0, 1, and `positions` has 0" in found["one partition"]
    assert "partition 1 ends at" in found["not reached"]
    assert "before the position 1000" in found["not reached"]
    assert "the broker has no topic 'none'" in found["no topic"]
    assert found["deleted"].startswith(
        "events: partition 0 of the topic begins at 3, and records from 0 are asked for: 3 up to"
    )
