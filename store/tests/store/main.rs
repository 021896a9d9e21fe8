//! The repository as its users see it: threads, processes, damage, full disks and power cuts.

mod documents;
mod full_disk;
mod images;
mod lease;
mod peer_power_cut;
mod power_cut;
mod processes;
mod support;
