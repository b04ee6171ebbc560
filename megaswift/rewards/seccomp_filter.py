"""The seccomp filter of the sandbox: the allowed system calls, compiled to classic BPF.

What is not named is refused (EPERM), and what only an attack would try ends the process. No call that takes a path,
makes a descriptor, a process or a thread, sends a signal or maps memory to run is allowed, so that nothing outside the
process can be named. The filter holds against native code too: the kernel asks it at every call, and nothing in the
process can take it off. Runs in the runner: no imports of ours, no libraries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables, and AUDIT_ARCH of linux/audit.h."""

_CallNumbers = tuple[int | None, int | None]
"""On x86_64 and aarch64; None: not there."""

ALLOWED: dict[str, _CallNumbers] = {
    "futex": (202, 98),
    "read": (0, 63),
    "write": (1, 64),
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "lseek": (8, 62),
    "close": (3, 57),
    "rt_sigreturn": (15, 139),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "sigaltstack": (131, 132),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "restart_syscall": (219, 128),
    "pause": (34, None),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "times": (100, 153),
    "getrlimit": (97, 163),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""Whatever their arguments."""

WITHOUT_EXEC: dict[str, _CallNumbers] = {"mmap": (9, 222), "mprotect": (10, 226)}
"""Allowed unless the memory is to be run."""
READING: dict[str, _CallNumbers] = {
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "fadvise64": (221, 223),
}
"""Also allowed to a parser that still imports its own modules; and so are opening a file without writing, and memory
that is run."""

FATAL: dict[str, _CallNumbers] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "chdir": (80, 49),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "creat": (85, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "eventfd2": (290, 19),
    "timer_create": (222, 107),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "syslog": (103, 116),
    "sendfile": (40, 71),
    "splice": (275, 76),
}
"""The process ends with SIGSYS: whatever it said before, it tried this."""

OPENING: dict[int, dict[str, _CallNumbers]] = {1: {"open": (2, None)}, 2: {"openat": (257, 56)}}
"""By the argument that holds the flags."""
WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND: the same on both architectures."""
PROT_EXEC = 4

ALLOW = 0x7FFF0000
"""SECCOMP_RET_ALLOW."""
REFUSE = 0x00050000 | 1
"""SECCOMP_RET_ERRNO with EPERM."""
KILL = 0x80000000
"""SECCOMP_RET_KILL_PROCESS."""
_LOAD = 0x20
_EQUAL = 0x15
_ABOVE = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_X32 = 0x40000000
"""Numbers from here on are x86_64's second set of calls, which would pass the numbers below."""
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16

Instruction = tuple[int, int, int, int]


def _returns(number: int, verdict: int) -> Iterator[Instruction]:
    yield (_EQUAL, 0, 1, number)
    yield (_RETURN, 0, 0, verdict)


def _by_bits(number: int, argument: int, bits: int, verdicts: tuple[int, int]) -> Iterator[Instruction]:
    """One verdict where an argument has any of the bits, the other where it has none. They are in its lower half
    (little endian)."""
    yield (_EQUAL, 0, 4, number)
    yield (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    yield (_ANY_BIT, 0, 1, bits)
    yield (_RETURN, 0, 0, verdicts[0])
    yield (_RETURN, 0, 0, verdicts[1])


def _there(table: dict[str, _CallNumbers], column: int) -> Iterator[int]:
    return (number for numbers in table.values() if (number := numbers[column]) is not None)


def filter_instructions(machine: str, reading: bool = False) -> list[Instruction]:
    """The filter for one architecture; `reading`: files may be read."""
    column, architecture = ARCHITECTURES[machine]
    instructions: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_ABOVE, 0, 1, _X32),
        (_RETURN, 0, 0, KILL),
    ]
    for argument, table in OPENING.items():
        for number in _there(table, column):
            instructions += _by_bits(number, argument, WRITING, (KILL, ALLOW if reading else REFUSE))
    for number in _there(WITHOUT_EXEC, column):
        instructions += _by_bits(number, 2, PROT_EXEC, (ALLOW if reading else REFUSE, ALLOW))
    for table, verdict in ((ALLOWED, ALLOW), (READING if reading else {}, ALLOW), (FATAL, KILL)):
        for number in _there(table, column):
            instructions += _returns(number, verdict)
    return [*instructions, (_RETURN, 0, 0, REFUSE)]


def filter_program(machine: str, reading: bool = False) -> bytes:
    """The same as the kernel reads it: struct sock_filter[]."""
    return b"".join(struct.pack("=HBBI", *one) for one in filter_instructions(machine, reading))
