"""Real gangs of the local engine on CPUs, driven from a process that has everything imported.

forked("-m", "tests.helpers.gang_worker", CASE, ROOT, ...)    prints a line of JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers import forked_children
from tests.helpers.gang_driver import GangDriver, digest, quickstart_base, quickstart_jobs
from tlora_megatron.service.engines.local import LocalEngine
from tlora_megatron.service.home import Lease, write_lease
from tlora_megatron.service.messages import GangFolder

STEPS = {"mirror": 14, "ordered": 10}
PORTION = 1024
LAYOUT = {"tp_size": 2, "sequence_parallel": True, "lora_sharding": "s_lora"}
LEASE_S = 4.0
RUN = {"micro_batch_tokens": 2048}


def make_driver(root: Path, **more: Any) -> GangDriver:
    engine = LocalEngine(root, 0, slots=2, preforked=1)
    driver = GangDriver(
        engine,
        root,
        2,
        **{"base_model": quickstart_base(), "parallel": LAYOUT, "run": RUN, "lease_s": 120, **more},
    )
    for number, document in enumerate(documents(), 1):
        driver.submit(f"j{number}", document, checkpoint_every_steps=3)
    return driver


def documents() -> list[dict[str, Any]]:
    more = {"portion_tokens": PORTION, "schedule": {"name": "cosine"}}
    jobs = quickstart_jobs(list(STEPS), **more)
    del jobs["ordered"]["data"]["eval"], jobs["ordered"]["eval_every_steps"]
    return [job | {"max_steps": STEPS[name]} for name, job in jobs.items()]


def plain(root: Path) -> dict[str, Any]:
    driver = make_driver(root)
    driver.start()
    return finish(driver)


def killed(root: Path, seed: str, kills: str) -> dict[str, Any]:
    """Ranks are SIGKILLed at random moments, in the start and in training."""
    choose, left = random.Random(int(seed)), int(kills)
    driver = make_driver(root)
    driver.start()
    while left:
        pause_s = choose.uniform(0.0, 1.5)
        end_s = time.monotonic() + pause_s
        driver.run_until(lambda end_s=end_s: time.monotonic() > end_s or is_over(driver))
        if is_over(driver):
            driver.stop()
            break
        victims = pids(driver)
        if victims:
            with suppress(ProcessLookupError):  # dead already, which the engine has yet to see
                os.kill(choose.choice(victims), signal.SIGKILL)
                left -= 1
    return finish(driver) if not is_over(driver) else result(driver)


def adopted(root: Path) -> dict[str, Any]:
    """The controller's process is SIGKILLed in the middle, and another one takes the gang up."""
    child = os.fork()
    if child == 0:
        driver = make_driver(root)
        driver.start()
        driver.run_until(lambda: all(len(job.losses) > 2 for job in driver.jobs.values()))
        (root / "half.json").write_text(json.dumps({"posted": driver.posted, "seen": driver.seen}))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    driver = make_driver(root)
    half = json.loads((root / "half.json").read_text())
    driver.epoch, driver.posted, driver.answered = 1, half["posted"], half["seen"]
    infos = driver.engine.gangs()
    assert [(info.gang, info.epoch, info.alive) for info in infos] == [("g", 1, True)], infos
    return finish(driver)


def zombie(root: Path) -> dict[str, Any]:
    """A gang is stopped past its lease, its jobs given away, and woken up again."""
    driver = make_driver(root, lease_s=LEASE_S)
    driver.restarts = False
    while not stop_in_training(driver):
        pass
    driver.post("renew")  # an old command, which must not renew the lease
    time.sleep(LEASE_S + 0.5)
    for job in driver.jobs:
        write_lease(driver.home.job(job), Lease(gang="h", epoch=1, lease=2))
    before = contents(driver)
    signal_all(pids(driver), signal.SIGCONT)
    driver.run_until(lambda: not driver.engine.gangs())
    driver.poll()
    after = contents(driver)
    return {
        "changed": sorted(k for k in before | after if before.get(k) != after.get(k)),
        "last": driver.events[-1].kind,
        "reason": driver.events[-1].body.get("reason", ""),
    }


def stop_in_training(driver: GangDriver) -> bool:
    """Starts an epoch and stops its ranks once all jobs train; False if its lease ended before.

    It may: a busy machine can hold up a rank, or this process, for longer than a lease.
    """
    for job in driver.jobs.values():
        job.losses.clear()
    driver.start()
    while not all(job.losses for job in driver.jobs.values()):
        driver.post("renew")
        end_s = time.monotonic() + LEASE_S / 8
        driver.run_until(lambda end_s=end_s: time.monotonic() > end_s)
        if driver.deaths and driver.deaths[-1].epoch == driver.epoch:
            return False
    try:
        signal_all(pids(driver), signal.SIGSTOP)
    except ProcessLookupError:
        return False
    return True


def young(root: Path) -> dict[str, Any]:
    """A rank is killed once a job was saved once, long before a save is due."""
    driver = make_driver(root)
    document = documents()[1] | {"max_steps": 100_000}
    job = driver.submit("j9", document, checkpoint_every_s=3600.0)
    driver.start()
    driver.run_until(lambda: "saved" in job.heard_s)
    os.kill(pids(driver)[1], signal.SIGKILL)

    def told(kind: str, epoch: int) -> list[dict[str, Any]]:
        said = (e for e in driver.events if (e.kind, e.job, e.epoch) == (kind, "j9", epoch))
        return [dict(event.body) for event in said]

    driver.run_until(lambda: bool(told("joined", 2)))
    return {"saved": told("saved", 1)[-1]["step"], "from_step": told("joined", 2)[0]["from_step"]}


def hung(root: Path) -> dict[str, Any]:
    """A rank is stopped in the middle and never goes on; before that the gang idles for long."""
    driver = make_driver(root, run=RUN | {"hang_timeout_s": 15.0})
    driver.start()
    driver.run_to_end()
    end_s = time.monotonic() + 40.0
    driver.run_until(lambda: time.monotonic() > end_s)
    assert not driver.deaths
    driver.submit("j9", documents()[1] | {"max_steps": 100_000})
    driver.run_until(lambda: bool(driver.jobs["j9"].losses))
    driver.restarts = False
    os.kill(pids(driver)[1], signal.SIGSTOP)
    driver.run_until(lambda: bool(driver.deaths))
    return {"reason": driver.deaths[0].body["reason"]}


def finish(driver: GangDriver) -> dict[str, Any]:
    driver.run_to_end()
    driver.stop()
    return result(driver)


def result(driver: GangDriver) -> dict[str, Any]:
    return {
        "digests": driver.adapter_digests(),
        "losses": {job: sorted(driven.losses.items()) for job, driven in driver.jobs.items()},
        "ended": {job: driven.ended for job, driven in driver.jobs.items()},
        "deaths": [dict(event.body) for event in driver.deaths],
        "kinds": sorted({event.kind for event in driver.events}),
    }


def is_over(driver: GangDriver) -> bool:
    return all(driven.ended is not None for driven in driver.jobs.values())


def pids(driver: GangDriver) -> list[int]:
    """The ranks of the present epoch that have said who they are."""
    folder = GangFolder(driver.home.root, "g", driver.epoch)
    found = [folder.pid(rank) for rank in range(2)]
    return [int(path.read_text().split()[0]) for path in found if path.exists()]


def signal_all(ranks: list[int], number: int) -> None:
    for pid in ranks:
        os.kill(pid, number)


def contents(driver: GangDriver) -> dict[str, str]:
    """Digests of all files of all jobs that somebody may read.

    A rank that was stopped in the middle of a write goes on with it when it wakes up, in a hidden
    folder of its own (`atomic_directory`); the promise is that nothing of it takes a name.
    """
    files = (path for path in driver.home.jobs.rglob("*") if path.is_file())
    read = (path for path in files if not path.parent.name.endswith(".incoming"))
    return {str(path): digest(path) for path in read}


CASES = {case.__name__: case for case in (plain, killed, adopted, zombie, hung, young)}


def run_case(cases: Mapping[str, Callable[..., dict[str, Any]]], *, forks: bool = True) -> None:
    """Runs the case of the command line, prints its result, and ends the gangs that it left."""
    case, root, args = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if forks:
        forked_children.install()
    try:
        print("RESULT " + json.dumps(cases[case](root, *args)))
    finally:
        engine = LocalEngine(root, 0, slots=4, preforked=0)
        for info in engine.gangs():
            engine.kill(info.gang, info.epoch)


if __name__ == "__main__":
    run_case(CASES)
