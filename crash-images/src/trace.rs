//! Records the file operations of a program with `strace`.

use std::collections::{BTreeSet, HashMap};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::operation::Operation;

/// The file that marks are written to. Only the recorder sees them.
const MARKS: &str = "/dev/null";

/// The environment variable with the working directory of a workload.
const ROOT: &str = "CAIRN_TEST_RECORDED";

/// The working directory of a workload, if this process is one that is recorded.
pub fn recorded_root() -> Option<PathBuf> {
    env::var_os(ROOT).map(PathBuf::from)
}

/// System calls that change files, that move a file position, or that the recorder cannot follow.
const CALLS: &str = "openat,open,creat,lseek,read,write,pwrite64,writev,pwritev,pwritev2,ftruncate,\
    truncate,fallocate,fsync,fdatasync,syncfs,sync,rename,renameat,renameat2,unlink,unlinkat,mkdir,\
    mkdirat,rmdir,link,linkat,symlink,symlinkat,mmap,copy_file_range,sendfile,splice,io_uring_setup,\
    io_submit";

/// Adds a mark to the recording: the workload has reached this point.
pub fn mark(text: &str) {
    let mut marks =
        fs::OpenOptions::new().write(true).open(MARKS).expect("opening the file for marks");
    marks.write_all(text.as_bytes()).expect("writing a mark");
}

/// Runs a workload in a directory that contains the paths `existing`, and returns its operations.
pub(crate) fn trace(
    root: &Path,
    existing: BTreeSet<PathBuf>,
    workload: &Command,
) -> Vec<Operation> {
    let root = fs::canonicalize(root).expect("finding the directory to record");
    let trace = tempfile::NamedTempFile::new().expect("creating a file for the trace");
    let mut strace = Command::new("strace");
    // All strings are hexadecimal, so that they contain nothing that looks like syntax.
    strace.args(["-f", "-q", "-y", "-v", "-xx", "-s", "1000000000", "-e", "signal=none"]);
    strace.args(["-e", &format!("trace={CALLS}"), "-o"]).arg(trace.path());
    strace.arg("--").arg(workload.get_program()).args(workload.get_args());
    strace.env(ROOT, &root);
    let output = strace.output().expect("starting strace, which this test needs");
    assert!(
        output.status.success(),
        "the workload failed, or strace may not trace here ({}):\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    let text = fs::read_to_string(trace.path()).expect("reading the trace");
    let mut parser = Parser { root, existing, ..Parser::default() };
    text.lines().for_each(|line| parser.line(line));
    let done = parser.operations.last();
    assert!(
        matches!(done, Some(Operation::Mark(text)) if text == "done"),
        "the workload did not reach its end: {done:?}",
    );
    parser.operations
}

#[derive(Default)]
struct Parser {
    root: PathBuf,
    operations: Vec<Operation>,
    /// Everything that exists below the root.
    existing: BTreeSet<PathBuf>,
    /// Open files by descriptor. A closed one stays until its number is used again.
    open: HashMap<u32, OpenFile>,
}

#[derive(Clone, Copy, Default)]
struct OpenFile {
    position: usize,
    append: bool,
    durable: bool,
}

impl Parser {
    fn line(&mut self, line: &str) {
        // A line has the process id, then the call.
        let call = line.split_once(' ').map_or(line, |(_, call)| call.trim_start());
        let Some((name, rest)) = call.split_once('(') else { return };
        let (Some((arguments, result)), false) =
            (rest.rsplit_once(" = "), call.ends_with("<unfinished ...>"))
        else {
            let is_ours = strings(line).iter().any(|path| self.below(path.clone()).is_some());
            assert!(!is_ours, "the workload makes calls from several threads at once: {name}");
            return;
        };
        let digits = result.split(|c: char| !c.is_ascii_digit()).next();
        // A call that failed has changed nothing.
        let Some(result) = digits.and_then(|digits| digits.parse::<usize>().ok()) else { return };
        let arguments = arguments.trim_end().trim_end_matches(')');
        let fields: Vec<_> = arguments.split(", ").collect();
        let number = |index: usize| -> usize {
            fields[index].parse().unwrap_or_else(|_| panic!("a number in {name}"))
        };
        match name {
            "openat" => self.opened(&fields, result),
            "open" | "creat" => panic!("the recorder does not support {name}"),
            "mkdir" => self.made(self.named(fields[0]), Operation::MakeDirectory),
            "mkdirat" => self.made(self.named_at(fields[0], fields[1]), Operation::MakeDirectory),
            "rename" => self.renamed(self.named(fields[0]), self.named(fields[1])),
            "renameat" | "renameat2" => {
                let to = self.named_at(fields[2], fields[3]);
                self.renamed(self.named_at(fields[0], fields[1]), to);
            }
            "unlink" => self.removed(self.named(fields[0])),
            "unlinkat" => self.removed(self.named_at(fields[0], fields[1])),
            "write" if path_of(fields[0]) == Path::new(MARKS) => {
                let text = String::from_utf8(bytes(arguments)).expect("marks are text");
                self.operations.push(Operation::Mark(text));
            }
            "lseek" => self.descriptor(fields[0]).position = result,
            "read" => self.descriptor(fields[0]).position += result,
            _ => {
                // The descriptor is the first argument, or the fifth one of mmap.
                let index = if name == "mmap" { 4 } else { 0 };
                let field = fields.get(index).copied().unwrap_or_default();
                let Some(path) = self.file(field) else { return };
                match name {
                    "write" | "writev" => {
                        let file = *self.descriptor(field);
                        assert!(!file.append, "the recorder does not support appending");
                        self.descriptor(field).position += result;
                        self.wrote(path, file, file.position, arguments, result);
                    }
                    "pwrite64" | "pwritev" => {
                        let file = *self.descriptor(field);
                        let offset = number(fields.len() - 1);
                        self.wrote(path, file, offset, arguments, result);
                    }
                    "ftruncate" => {
                        self.operations.push(Operation::SetLen { path, len: number(1) });
                    }
                    "fallocate" => {
                        let (mode, offset, len) = (fields[1], number(2), number(3));
                        if mode == "FALLOC_FL_KEEP_SIZE" {
                            // Neither the content nor the length changes.
                            return;
                        }
                        self.operations.push(match mode {
                            "0" => Operation::Extend { path, len: offset + len },
                            "FALLOC_FL_KEEP_SIZE|FALLOC_FL_PUNCH_HOLE" => {
                                Operation::Punch { path, offset, len }
                            }
                            _ => panic!("the recorder does not support fallocate with {mode}"),
                        });
                    }
                    "fsync" | "fdatasync" => self.operations.push(Operation::Sync(path)),
                    "mmap" => {
                        let shared = fields[3].contains("MAP_SHARED");
                        assert!(
                            !shared || !fields[2].contains("PROT_WRITE"),
                            "the recorder does not support shared mappings"
                        );
                    }
                    _ => panic!("the recorder does not support {name} of {}", path.display()),
                }
            }
        }
        assert_ne!(name, "io_uring_setup", "the recorder does not see operations of io_uring");
    }

    fn opened(&mut self, fields: &[&str], descriptor: usize) {
        let flags: Vec<_> = fields[2].split('|').collect();
        let has = |flag| flags.contains(&flag);
        let file = OpenFile {
            position: 0,
            append: has("O_APPEND"),
            durable: has("O_DSYNC") || has("O_SYNC"),
        };
        self.open.insert(descriptor as u32, file);
        let Some(path) = self.named_at(fields[0], fields[1]) else { return };
        assert!(!has("O_TMPFILE"), "the recorder does not support files without names");
        if has("O_CREAT") && !self.existing.contains(&path) {
            self.made(Some(path), Operation::Create);
        } else if has("O_TRUNC") {
            self.operations.push(Operation::SetLen { path, len: 0 });
        }
    }

    fn wrote(&mut self, path: PathBuf, file: OpenFile, offset: usize, text: &str, len: usize) {
        let mut data = bytes(text);
        assert!(data.len() >= len, "the trace contains all written data");
        data.truncate(len);
        self.operations.push(Operation::Write { path: path.clone(), offset, data: data.into() });
        if file.durable {
            self.operations.push(Operation::SyncWrite(path));
        }
    }

    fn made(&mut self, path: Option<PathBuf>, operation: impl FnOnce(PathBuf) -> Operation) {
        let Some(path) = path else { return };
        self.existing.insert(path.clone());
        self.operations.push(operation(path));
    }

    fn renamed(&mut self, from: Option<PathBuf>, to: Option<PathBuf>) {
        match (from, to) {
            (Some(from), Some(to)) => {
                self.existing.remove(&from);
                self.existing.insert(to.clone());
                self.operations.push(Operation::Rename { from, to });
            }
            (None, None) => {}
            _ => panic!("the recorder does not support a rename into or out of the directory"),
        }
    }

    fn removed(&mut self, path: Option<PathBuf>) {
        let Some(path) = path else { return };
        self.existing.remove(&path);
        self.operations.push(Operation::Remove(path));
    }

    fn descriptor(&mut self, field: &str) -> &mut OpenFile {
        let number = field.split('<').next().and_then(|number| number.parse().ok());
        self.open.entry(number.expect("a descriptor")).or_default()
    }

    /// The file of a descriptor, if it is below the root and has a name.
    fn file(&self, field: &str) -> Option<PathBuf> {
        if field.ends_with("(deleted)") {
            return None;
        }
        self.below(path_of(field))
    }

    fn named(&self, field: &str) -> Option<PathBuf> {
        self.below(strings(field).pop()?)
    }

    fn named_at(&self, directory: &str, field: &str) -> Option<PathBuf> {
        self.below(path_of(directory).join(strings(field).pop()?))
    }

    /// The path relative to the root, or `None` if it is outside or the file holds no persistent
    /// data.
    fn below(&self, path: PathBuf) -> Option<PathBuf> {
        let path = path.strip_prefix(&self.root).ok()?;
        (!path.to_string_lossy().ends_with("-shm")).then(|| path.to_owned())
    }
}

/// The path of a descriptor, such as `3</path>`.
fn path_of(field: &str) -> PathBuf {
    let path = field.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
    path.map(|(path, _)| PathBuf::from(OsString::from_vec(unescape(path)))).unwrap_or_default()
}

/// The strings in the text, as paths.
fn strings(text: &str) -> Vec<PathBuf> {
    let strings = text.split('"').skip(1).step_by(2);
    strings.map(|string| PathBuf::from(OsString::from_vec(unescape(string)))).collect()
}

/// The strings in the text, concatenated.
fn bytes(text: &str) -> Vec<u8> {
    text.split('"').skip(1).step_by(2).flat_map(unescape).collect()
}

/// Decodes a string such as `\x41\x42`.
fn unescape(text: &str) -> Vec<u8> {
    let digit = |byte: u8| (byte as char).to_digit(16).expect("a hexadecimal digit") as u8;
    let escaped = text.as_bytes().chunks(4);
    escaped.map(|escape| digit(escape[2]) << 4 | digit(escape[3])).collect()
}
