//! Finds the programs and files that a guest needs.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Programs and files that `make` has built and fetched.
#[derive(Clone, Debug)]
pub struct Tools {
    /// The backend.
    pub cairn_blk: PathBuf,
    /// The operator's command line.
    pub cairn: PathBuf,
    /// The program of the vsock device.
    pub vsock: PathBuf,
    /// The guest's kernel.
    pub kernel: PathBuf,
    /// The guest's system, including the agent.
    pub initramfs: PathBuf,
}

impl Tools {
    /// Searches the directories of `make`, or those in `CAIRN_BIN_DIR` and `CAIRN_CACHE_DIR`.
    pub fn find() -> Result<Tools> {
        let programs = directory("CAIRN_BIN_DIR", || {
            // target/PROFILE/demo, or target/PROFILE/deps/TEST.
            let mut directory = env::current_exe().unwrap_or_default();
            directory.pop();
            if directory.ends_with("deps") {
                directory.pop();
            }
            directory
        });
        let cache = directory("CAIRN_CACHE_DIR", || {
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache")
        });
        Ok(Tools {
            cairn_blk: existing(programs.join("cairn-blk"))?,
            cairn: existing(programs.join("cairn"))?,
            vsock: existing(cache.join("tools/bin/vhost-device-vsock"))?,
            kernel: existing(cache.join("guest/vmlinuz"))?,
            initramfs: existing(cache.join("guest/initramfs"))?,
        })
    }
}

fn directory(variable: &str, default: impl FnOnce() -> PathBuf) -> PathBuf {
    env::var_os(variable).map_or_else(default, PathBuf::from)
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    if !path.exists() {
        bail!("{} does not exist; `make vm-test` builds and fetches it", path.display());
    }
    Ok(path)
}
