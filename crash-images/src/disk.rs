//! A disk with durable content and with changes that a power cut may lose.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use seeded_rng::Rng;

use crate::operation::Operation;
use crate::sparse::Sparse;

const ROOT: usize = 0;

/// Files and directories: their durable content, and each change since the last sync.
pub(crate) struct Disk {
    nodes: Vec<Node>,
}

enum Node {
    File(Content),
    Directory(Names),
    Link(PathBuf),
}

#[derive(Default)]
struct Content {
    durable: Sparse,
    changes: Vec<(Change, Durable)>,
}

/// Whether a change is durable although its file was not synced after it.
type Durable = bool;

enum Change {
    Write {
        offset: usize,
        data: Arc<[u8]>,
    },
    SetLen(usize),
    /// Extends the file to at least this length.
    Extend(usize),
    Punch {
        offset: usize,
        len: usize,
    },
}

/// The names in a directory.
#[derive(Default)]
struct Names {
    now: BTreeMap<OsString, usize>,
    durable: BTreeMap<OsString, usize>,
    /// Changes since the last sync. Each one is a set of names that change together.
    changes: Vec<Vec<(OsString, Option<usize>)>>,
}

/// Which changes that are not durable survive.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Losses {
    Nothing,
    Everything,
    /// Each change survives with this probability in percent.
    Whole(u64),
    /// Each atom of each change survives with this probability in percent.
    Torn(u64),
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Losses::Nothing => write!(f, "everything"),
            Losses::Everything => write!(f, "only durable changes"),
            Losses::Whole(share) => write!(f, "{share} % of the changes that were not durable"),
            Losses::Torn(share) => {
                write!(f, "{share} % of the atoms of changes that were not durable")
            }
        }
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self { nodes: vec![Node::Directory(Names::default())] }
    }
}

impl Disk {
    pub(crate) fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Create(path) => self.add(path, Node::File(Content::default())),
            Operation::MakeDirectory(path) => self.add(path, Node::Directory(Names::default())),
            Operation::Link { path, target } => self.add(path, Node::Link(target.clone())),
            Operation::Rename { from, to } => {
                assert_eq!(
                    from.parent(),
                    to.parent(),
                    "the directory of a renamed file does not change"
                );
                let node = self.find(from);
                let names = [(name_of(from), None), (name_of(to), Some(node))];
                self.directory_of(to).change(names.into());
            }
            Operation::Remove(path) => {
                self.directory_of(path).change(vec![(name_of(path), None)]);
            }
            Operation::Write { path, offset, data } => {
                self.change(path, Change::Write { offset: *offset, data: Arc::clone(data) });
            }
            Operation::SetLen { path, len } => self.change(path, Change::SetLen(*len)),
            Operation::Extend { path, len } => self.change(path, Change::Extend(*len)),
            Operation::Punch { path, offset, len } => {
                self.change(path, Change::Punch { offset: *offset, len: *len });
            }
            Operation::Sync(path) => {
                let node = self.find(path);
                match &mut self.nodes[node] {
                    Node::File(content) => content.sync(),
                    Node::Directory(names) => names.sync(),
                    Node::Link(_) => {}
                }
            }
            // The kernel reports the error once, and drops the data that it could not write.
            Operation::FailedSync(path) => {
                self.file(path).changes.retain(|(_, is_durable)| *is_durable);
            }
            Operation::SyncWrite(path) => {
                let last =
                    self.file(path).changes.last_mut().expect("a write comes before its sync");
                last.1 = true;
            }
            Operation::Mark(_) => {}
        }
    }

    fn add(&mut self, path: &Path, node: Node) {
        self.nodes.push(node);
        let number = self.nodes.len() - 1;
        self.directory_of(path).change(vec![(name_of(path), Some(number))]);
    }

    fn change(&mut self, path: &Path, change: Change) {
        self.file(path).changes.push((change, false));
    }

    fn file(&mut self, path: &Path) -> &mut Content {
        let node = self.find(path);
        match &mut self.nodes[node] {
            Node::File(content) => content,
            _ => panic!("{} is not a file", path.display()),
        }
    }

    fn directory_of(&mut self, path: &Path) -> &mut Names {
        let node = self.find(path.parent().unwrap_or(Path::new("")));
        match &mut self.nodes[node] {
            Node::Directory(names) => names,
            _ => panic!("the parent of {} is not a directory", path.display()),
        }
    }

    fn find(&self, path: &Path) -> usize {
        path.iter().fold(ROOT, |node, name| {
            let found = match &self.nodes[node] {
                Node::Directory(names) => names.now.get(name),
                _ => None,
            };
            *found.unwrap_or_else(|| panic!("{} does not exist", path.display()))
        })
    }

    /// An image that a power cut at this point could leave.
    pub(crate) fn image(&self, losses: Losses, atom: usize, rng: &mut Rng) -> Image {
        let mut image = Image::default();
        self.add_to(&mut image, Path::new(""), ROOT, losses, atom, rng);
        image
    }

    fn add_to(
        &self,
        image: &mut Image,
        path: &Path,
        node: usize,
        losses: Losses,
        atom: usize,
        rng: &mut Rng,
    ) {
        match &self.nodes[node] {
            Node::File(content) => {
                let bytes = content.after_power_cut(losses, atom, rng);
                image.0.insert(path.to_owned(), Entry::File(bytes));
            }
            Node::Link(target) => {
                image.0.insert(path.to_owned(), Entry::Link(target.clone()));
            }
            Node::Directory(names) => {
                image.0.insert(path.to_owned(), Entry::Directory);
                for (name, node) in names.after_power_cut(losses, rng) {
                    self.add_to(image, &path.join(name), node, losses, atom, rng);
                }
            }
        }
    }
}

impl Content {
    fn sync(&mut self) {
        for (change, _) in std::mem::take(&mut self.changes) {
            change.apply(&mut self.durable);
        }
    }

    fn after_power_cut(&self, losses: Losses, atom: usize, rng: &mut Rng) -> Sparse {
        let mut bytes = self.durable.clone();
        for (change, durable) in &self.changes {
            match (losses, change) {
                (Losses::Torn(share), Change::Write { offset, data }) if !durable => {
                    write_atoms(&mut bytes, *offset, data, atom, || rng.chance(share));
                }
                _ if *durable || losses.keep(rng) => change.apply(&mut bytes),
                _ => {}
            }
        }
        bytes
    }
}

impl Change {
    fn apply(&self, bytes: &mut Sparse) {
        match self {
            Change::Write { offset, data } => bytes.write(*offset, data),
            Change::SetLen(len) => bytes.set_len(*len),
            Change::Extend(len) => bytes.extend(*len),
            Change::Punch { offset, len } => bytes.punch(*offset, *len),
        }
    }
}

/// Writes the atoms of `data` for which `keep` returns true. The length may survive without the
/// data.
fn write_atoms(
    bytes: &mut Sparse,
    offset: usize,
    data: &[u8],
    atom: usize,
    mut keep: impl FnMut() -> bool,
) {
    if keep() {
        bytes.extend(offset + data.len());
    }
    let mut done = 0;
    while done < data.len() {
        let end = ((offset + done) / atom + 1) * atom - offset;
        let piece = &data[done..end.min(data.len())];
        if keep() {
            bytes.write(offset + done, piece);
        }
        done += piece.len();
    }
}

impl Names {
    fn change(&mut self, change: Vec<(OsString, Option<usize>)>) {
        apply(&mut self.now, &change);
        self.changes.push(change);
    }

    fn sync(&mut self) {
        self.changes.clear();
        self.durable = self.now.clone();
    }

    fn after_power_cut(&self, losses: Losses, rng: &mut Rng) -> BTreeMap<OsString, usize> {
        let mut names = self.durable.clone();
        for change in &self.changes {
            if losses.keep(rng) {
                apply(&mut names, change);
            }
        }
        names
    }
}

fn apply(names: &mut BTreeMap<OsString, usize>, change: &[(OsString, Option<usize>)]) {
    for (name, node) in change {
        match node {
            Some(node) => names.insert(name.clone(), *node),
            None => names.remove(name),
        };
    }
}

fn name_of(path: &Path) -> OsString {
    path.file_name().unwrap_or(OsStr::new("")).to_owned()
}

impl Losses {
    fn keep(self, rng: &mut Rng) -> bool {
        match self {
            Losses::Nothing => true,
            Losses::Everything => false,
            Losses::Whole(share) | Losses::Torn(share) => rng.chance(share),
        }
    }
}

/// The content of a directory tree: files, directories and links.
#[derive(Default)]
pub(crate) struct Image(BTreeMap<PathBuf, Entry>);

enum Entry {
    File(Sparse),
    Directory,
    Link(PathBuf),
}

impl Image {
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.keys().map(PathBuf::as_path)
    }

    /// A hash of the image. Different images have different hashes.
    pub(crate) fn fingerprint(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        for (path, entry) in &self.0 {
            let path = path.display();
            match entry {
                Entry::File(bytes) => {
                    hasher.update(format!("file {path} {}\n", bytes.len()).as_bytes());
                    for (offset, block) in bytes.data() {
                        hasher.update(&offset.to_le_bytes()).update(block);
                    }
                }
                Entry::Directory => drop(hasher.update(format!("directory {path}\n").as_bytes())),
                Entry::Link(target) => {
                    let target = target.display();
                    hasher.update(format!("link {path} {target}\n").as_bytes());
                }
            }
        }
        hasher.finalize()
    }

    /// Creates the directory `root` with the content of this image.
    pub(crate) fn write_to(&self, root: &Path) -> io::Result<()> {
        // In the order of paths, a directory comes before its entries.
        for (path, entry) in &self.0 {
            // The root has an empty path. Joining it would append a slash, which requires an
            // existing directory.
            let path = if path.as_os_str().is_empty() { root.into() } else { root.join(path) };
            match entry {
                Entry::File(bytes) => {
                    let file = File::create_new(&path)?;
                    file.set_len(bytes.len() as u64)?;
                    for (offset, block) in bytes.data() {
                        file.write_all_at(block, offset as u64)?;
                    }
                }
                Entry::Directory => fs::create_dir(&path)?,
                Entry::Link(target) => symlink(target, &path)?,
            }
        }
        Ok(())
    }
}
