//! The agent as a program, with a fake `cairn-blk` on a unix socket.

mod conversation;
mod freeze;
mod host;
