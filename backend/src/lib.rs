//! The vhost-user-blk process of one disk.
//!
//! ```text
//!  hypervisor ── socket ──► vhost ── commands ──► worker (one thread, one virtqueue, one ring)
//!                                                   │ request::parse     pure
//!                                                   │ mirror.plan_write  what must happen first?
//!                                                   │ uring              I/O on the data file
//!                                                   ▼
//!       fetch ◄─── absent blocks ──────────────── mirror ◄──────── layers ────► commit::persist
//!         ▲                                         ▲                                 │
//!         │                                Commits::checkpoint ◄── control ◄── agent, cairn
//!         └──────────────────────── image: repository (cairn-store) ◄─────────────────┘
//! ```
//!
//! A module uses only modules that are further down in this table:
//!
//! | module | is |
//! |---|---|
//! | [`start`], [`args`] | assembling, serving and closing a disk; the command line |
//! | `control` | the control socket of the host and the proxy for the guest |
//! | `vhost` | the hypervisor's messages |
//! | `worker` | one thread for each virtqueue: requests from pop to completion |
//! | `commit` | checkpoints, from the request to the publication |
//! | `lease`, `grow` | the thread that renews the writer's lease; growing the disk with its image |
//! | `fetch`, `flush` | background threads: lazy reads, the map |
//! | `guest` | what is known of the guest: ledgers, ownership of the rings |
//! | `local_disk`, `image` | the two halves of a disk: local files, and repository |
//! | `uring`, `memory`, `request` | the ring, guest memory, and parsing of descriptor chains |
//! | `counters` | the numbers for `cairn stats` and `cairn status` |
//! | `mirror` | the decisions: presence, epochs, copy-on-write, claims; and the mirror's files |
//! | `rate_limit`, `log_limit` | limits of what a guest causes: requests, log lines |
//! | `mapping`, `sys` | memory from the kernel, and system calls |

pub mod args;
mod commit;
mod control;
mod counters;
mod fetch;
mod flush;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grow;
mod guest;
mod image;
mod lease;
mod local_disk;
mod log_limit;
mod mapping;
mod memory;
mod mirror;
mod rate_limit;
mod request;
pub mod start;
mod sys;
mod uring;
mod vhost;
mod worker;
