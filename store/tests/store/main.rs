//! The repository as its users see it: threads, processes, damage and full disks.

mod full_disk;
mod images;
mod lease;
mod processes;
mod support;
