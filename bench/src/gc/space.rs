//! How much space is left after half of the images were removed and collected.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{CHUNK, MIB, Results, collect_all, import, open, random};
use crate::args::Args;
use crate::cluster::PEERS;
use crate::report::goals::Goal;
use crate::report::table::Table;
use crate::server::catalog::{Catalog, LOOPBACK};
use crate::site::Site;
use crate::sys::settle;

/// Half of the content of each image is in all of them.
const IMAGES: usize = 8;

/// The redundancy on the peers, and the space that it takes for each byte.
const REDUNDANCY: (&str, usize) = ("rs=4+4", 2);

/// Returns the bytes that are alive and those that are used: in a directory, and on peers.
pub(super) fn run(site: &Site, args: &Args, results: &mut Results) -> Result<[(u64, u64); 2]> {
    let chunks = if args.quick { 64 } else { 512 };
    // A peer keeps some space in reserve, however little it has.
    let all = [in_directory(site, chunks)?, on_peers(site, 2 * chunks)?];
    let head = ["in", "MiB alive", "MiB used"];
    let mut table = Table::new("Space after half of the images were removed", &head);
    let peers = format!("{PEERS} peers, {}", REDUNDANCY.0);
    for ((alive, used), place) in all.into_iter().zip(["a directory", &*peers]) {
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / MIB);
        table.row([place.to_owned(), mib(alive), mib(used)]);
        let goal = format!("space used in {place}, of what is alive");
        results.goals.push(Goal::at_most(goal, used as f64 / alive as f64, 1.05));
    }
    results.tables.push(table);
    Ok(all)
}

/// The bytes of the content that the images have after the removal.
fn alive(chunks: usize) -> u64 {
    (chunks * CHUNK * (1 + IMAGES / 2)) as u64
}

fn in_directory(site: &Site, chunks: usize) -> Result<(u64, u64)> {
    let area = site.area()?;
    let path = area.path("space");
    let repository = open(&path)?;
    let shared = random(7, chunks);
    for image in 0..IMAGES {
        let mut contents = shared.clone();
        contents.extend(random(100 + image as u64, chunks));
        import(&repository, &format!("image{image}"), &contents)?;
    }
    for image in (0..IMAGES).step_by(2) {
        repository.remove_image(&format!("image{image}").parse()?, false)?;
    }
    let report = collect_all(&repository)?;
    ensure!(report.freed.bytes >= (chunks * CHUNK * IMAGES / 2) as u64, "{report:?}");
    drop(repository);
    Ok((alive(chunks), used(&path)?))
}

/// The peers run while their files are measured.
fn on_peers(site: &Site, chunks: usize) -> Result<(u64, u64)> {
    let area = site.area()?;
    let catalog = Catalog::with_peers(PEERS, site, &area, &area.path("catalog"), LOOPBACK)?;
    catalog.wait_for_peers(site, PEERS)?;
    let source = area.path("disk.raw");
    let path = source.to_str().context("a path of this program is not UTF-8")?;
    let shared = random(7, chunks).concat();
    for image in 0..IMAGES {
        let own = random(100 + image as u64, chunks).concat();
        fs::write(&source, [&*shared, &own].concat()).context("writing a disk")?;
        catalog.cairn(
            site,
            &["import", path, &format!("image{image}"), "--redundancy", REDUNDANCY.0],
        )?;
    }
    for image in (0..IMAGES).step_by(2) {
        catalog.cairn(site, &["rm", &format!("image{image}")])?;
    }
    catalog.cairn(site, &["gc", "--grace", "0"])?;
    settle();
    let peers = (0..PEERS).map(|number| used(&area.path(&format!("catalog-peer{number}"))));
    let used = peers.sum::<Result<u64>>()?;
    Ok((alive(chunks) * REDUNDANCY.1 as u64, used))
}

/// The bytes that the files of a directory take on the disk.
fn used(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let (path, metadata) = {
            let entry = entry?;
            (entry.path(), entry.metadata()?)
        };
        bytes += if metadata.is_dir() { used(&path)? } else { metadata.blocks() * 512 };
    }
    Ok(bytes)
}
