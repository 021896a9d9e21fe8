//! The vhost-user-blk process of one disk.
//!
//! ```text
//!  hypervisor ── socket ──► vhost ── commands ──► worker (one thread, one virtqueue, one ring)
//!                                                  │ request::parse      pure
//!                                                  │ mirror.plan         what must happen first?
//!                                                  │ uring               the mirror's file
//!                                                  ▼
//!        fetch ◄── absent blocks ────────────── mirror ◄────────── frozen epochs ──► commit::persist
//!          ▲                                       ▲                                      │
//!          │                                 commit::checkpoint ◄── control ◄── agent, cairn
//!          └────────────────────────── repository (cairn-store) ◄────────────────────────┘
//! ```
//!
//! | module | is |
//! |---|---|
//! | [`args`], [`start`] | the command line; opening, serving, resting |
//! | `vhost` | what the hypervisor says |
//! | `worker` | one thread for each queue; requests from pop to completion |
//! | `request` | descriptor chain → request; trusts nothing |
//! | `memory`, `mapping`, `uring`, `sys` | the modules with `unsafe` code: guest memory, buffers, the ring, sockets |
//! | `mirror` | the decisions: presence, epochs, copy-on-write, claims; and the mirror's files |
//! | `counters` | what `cairn stats` and `cairn status` tell |
//! | `fetch`, `flush`, `lease` | background threads |
//! | `commit` | checkpoints, from the cut to the publication |
//! | `control` | control socket and guest proxy |

pub mod args;
mod commit;
mod control;
mod counters;
mod fetch;
mod flush;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guest;
mod image;
mod lease;
mod local_disk;
mod mapping;
mod memory;
mod mirror;
mod request;
pub mod start;
mod sys;
mod uring;
mod vhost;
mod worker;
