"""A real SLURM of one node with accounting, in one folder, for the slow tests; as root, from Debian's packages.

apt-get install --no-install-recommends slurm-wlm munge slurmdbd mariadb-server
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    "munged",
    "mariadbd",
    "mariadb",
    "mariadb-install-db",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "sbatch",
    "sacctmgr",
)


def missing() -> str:
    """Why there can be no SLURM here; empty if there can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"SLURM is not installed ({lacking[0]} is missing)"
    return "" if os.geteuid() == 0 else "starting SLURM's daemons takes root"


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``sbatch`` and the others find a running node; everything is stopped afterwards."""
    for name in ("state", "spool", "log", "run", "db"):
        (folder / name).mkdir(parents=True)
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "MYSQL_UNIX_PORT": str(folder / "run" / "db.sock")}
    daemons: list[subprocess.Popen[bytes]] = []
    ports = _free_ports(3)

    def begin(*command: object) -> None:
        with (folder / "log" / f"{Path(str(command[0])).name}.out").open("ab") as log:
            daemons.append(
                subprocess.Popen([str(c) for c in command], stdout=log, stderr=log, env={**os.environ, **environment})
            )

    def ask(*command: str) -> bool:
        done = subprocess.run(command, capture_output=True, env={**os.environ, **environment})
        return done.returncode == 0

    try:
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        run = folder / "run"
        begin(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={run}/munge.sock",
            f"--pid-file={run}/munged.pid", f"--log-file={folder}/log/munged.log", f"--seed-file={run}/munge.seed",
        )  # fmt: skip
        subprocess.run(
            ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={folder}/db",
             "--auth-root-authentication-method=normal"],
            check=True, capture_output=True,
        )  # fmt: skip
        database = f"--socket={run}/db.sock"
        begin(
            "mariadbd", "--no-defaults", "--user=root", f"--datadir={folder}/db", database, "--skip-networking",
            f"--pid-file={run}/mariadb.pid", "--innodb-buffer-pool-size=64M", "--innodb-lock-wait-timeout=900",
        )  # fmt: skip
        create = ("mariadb", "--no-defaults", database, "-e", "CREATE DATABASE IF NOT EXISTS slurm_acct_db")
        _wait(lambda: ask(*create), "the database")
        _configure(folder, ports)
        begin("slurmdbd", "-D")
        _wait(lambda: ask("sacctmgr", "-n", "-i", "list", "cluster"), "slurmdbd")
        ask("sacctmgr", "-i", "-Q", "add", "cluster", "local")
        begin("slurmctld", "-D", "-c")
        begin("slurmd", "-D")
        _wait(lambda: _idle(environment), "the node")
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _idle(environment: dict[str, str]) -> bool:
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.stdout.strip() in ("idle", "mixed", "allocated")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait(there, what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not come up")
        time.sleep(0.2)


def _configure(folder: Path, ports: list[int]) -> None:
    host = socket.gethostname().split(".")[0]
    run, log = folder / "run", folder / "log"
    memory = int(next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line).split()[1])
    accounting = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={run}/munge.sock",
        "DbdHost": "localhost",
        "DbdPort": ports[0],
        "SlurmUser": "root",
        "PidFile": run / "slurmdbd.pid",
        "LogFile": log / "slurmdbd.log",
        "StorageType": "accounting_storage/mysql",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    cluster = {
        "ClusterName": "local",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={run}/munge.sock",
        "CredType": "cred/munge",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "ReturnToService": 2,
        "SlurmctldPort": ports[1],
        "SlurmdPort": ports[2],
        "SlurmctldPidFile": run / "slurmctld.pid",
        "SlurmdPidFile": run / "slurmd.pid",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldLogFile": log / "slurmctld.log",
        "SlurmdLogFile": log / "slurmd.log",
        "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "localhost",
        "AccountingStoragePort": ports[0],
        "AccountingStoragePass": run / "munge.sock",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 1,
        "JobAcctGatherParams": "OverMemoryKill",
        "DefMemPerCPU": 1024,
        "KillWait": 5,
    }
    (folder / "slurmdbd.conf").write_text("".join(f"{k}={v}\n" for k, v in accounting.items()))
    (folder / "slurmdbd.conf").chmod(0o600)
    lines = [f"{k}={v}\n" for k, v in cluster.items()]
    lines.append(
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory={memory * 9 // 10240} State=UNKNOWN\n"
    )
    lines.append(f"PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP\n")
    (folder / "slurm.conf").write_text("".join(lines))
