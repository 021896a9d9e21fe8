//! Tests of the real program, run as an operator runs it.

mod catalog;
mod cluster;
mod cluster_commits;
mod cluster_faults;
mod cluster_kills;
mod cluster_lies;
mod cluster_partition;
mod control;
mod exit_codes;
mod files;
mod gc;
mod help;
mod images;
mod lab;
mod mirrors;
mod names;
mod policy;
mod proxy;
mod readme;
mod repair;
mod scrub;
mod serve;
mod supervise;
mod support;
mod verify;
mod writer;
