//! The real `cairn-blk` process, and the directories that it uses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use cairn_agent::{DEFAULT_PORT, Event, Request};
use tempfile::TempDir;

use super::control::Control;
use super::device::{Device, Shape};
use super::sys;

/// The image that most tests use.
pub(crate) const IMAGE: &str = "vm1";

const START: Duration = Duration::from_secs(60);
const END: Duration = Duration::from_secs(60);

/// The directories and sockets of one test. They are removed with it.
pub(crate) struct Site {
    data: TempDir,
    /// Short, because a socket's path is limited to 107 bytes.
    sockets: TempDir,
}

impl Site {
    pub(crate) fn new() -> Site {
        let data = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory for data");
        let sockets = TempDir::with_prefix("cb").expect("a directory for sockets");
        Site { data, sockets }
    }

    /// A path for data on a real file system.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.data.path().join(name)
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The repository's directory.
    pub(crate) fn repository(&self) -> PathBuf {
        self.path("repository")
    }

    /// The repository's address.
    pub(crate) fn store(&self) -> String {
        format!("dir:{}", self.repository().display())
    }
}

/// The command line of one backend.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) store: String,
    pub(crate) image: String,
    pub(crate) mirror: PathBuf,
    pub(crate) live: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) control: PathBuf,
    pub(crate) vsock: PathBuf,
    pub(crate) queues: usize,
    pub(crate) extra: Vec<String>,
    /// Without a socket path: the socket is passed in another way.
    pub(crate) without_socket_path: bool,
}

impl Options {
    pub(crate) fn new(site: &Site) -> Options {
        Options::named(site, "disk")
    }

    /// Like [`Options::new`], with a mirror and sockets of another name.
    pub(crate) fn named(site: &Site, name: &str) -> Options {
        Options {
            store: site.store(),
            image: IMAGE.into(),
            mirror: site.path(name),
            live: site.path("live"),
            socket: site.socket(&format!("{name}.s")),
            control: site.socket(&format!("{name}.c")),
            vsock: site.socket(&format!("{name}.v")),
            queues: 2,
            extra: Vec::new(),
            without_socket_path: false,
        }
    }

    pub(crate) fn with(mut self, extra: &[&str]) -> Options {
        self.extra.extend(extra.iter().map(|word| word.to_string()));
        self
    }

    pub(crate) fn arguments(&self) -> Vec<String> {
        let path = |path: &Path| path.to_str().expect("paths of tests are UTF-8").to_string();
        let mut arguments: Vec<String> = vec![
            "--store".into(),
            self.store.clone(),
            "--image".into(),
            self.image.clone(),
            "--mirror".into(),
            path(&self.mirror),
            "--live".into(),
            path(&self.live),
            "--control".into(),
            path(&self.control),
            "--vsock".into(),
            path(&self.vsock),
            "--num-queues".into(),
            self.queues.to_string(),
        ];
        if !self.without_socket_path {
            arguments.extend(["--socket-path".into(), path(&self.socket)]);
        }
        arguments.extend(self.extra.iter().cloned());
        arguments
    }
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Standard error.
    pub(crate) message: String,
    pub(crate) output: String,
    pub(crate) after: Duration,
}

/// Runs the program with `arguments` and waits for its end, which must come soon.
pub(crate) fn run(arguments: &[String]) -> Ended {
    run_with(arguments, &[])
}

/// Runs the program with `arguments` and these environment variables.
pub(crate) fn run_with(arguments: &[String], variables: &[(&str, &str)]) -> Ended {
    let begin = Instant::now();
    let logs = TempDir::new().expect("a directory for logs");
    let (mut child, log) = spawn(arguments, logs.path(), |command| {
        command.envs(variables.iter().copied());
    });
    let status = wait(&mut child, START).unwrap_or_else(|| {
        let _ = child.kill();
        let _ = child.wait();
        panic!("{arguments:?} goes on instead of ending:\n{}", read(&log));
    });
    let output = read(&log.with_extension("out"));
    Ended { status, message: read(&log), output, after: begin.elapsed() }
}

fn spawn(
    arguments: &[String],
    logs: &Path,
    prepare: impl FnOnce(&mut Command),
) -> (Child, PathBuf) {
    let number = fs::read_dir(logs).map_or(0, |entries| entries.count());
    let log = logs.join(format!("cairn-blk-{number}.log"));
    let file = |path: &Path| File::create(path).expect("create a log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cairn-blk"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(file(&log.with_extension("out")))
        .stderr(file(&log));
    prepare(&mut command);
    (command.spawn().expect("start cairn-blk"), log)
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("wait for cairn-blk") {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A running backend. Its log is printed when the test fails.
pub(crate) struct Backend {
    child: Child,
    log: PathBuf,
    pub(crate) options: Options,
}

impl Backend {
    /// Starts a backend and waits until it answers on its control socket.
    pub(crate) fn start(options: &Options) -> Backend {
        Backend::start_with(options, |_| {})
    }

    pub(crate) fn start_with(options: &Options, prepare: impl FnOnce(&mut Command)) -> Backend {
        let mut backend = Backend::spawn(options, prepare);
        backend.wait_until_ready();
        backend
    }

    /// Starts a backend without waiting for it.
    pub(crate) fn spawn(options: &Options, prepare: impl FnOnce(&mut Command)) -> Backend {
        let logs = options.socket.parent().expect("sockets have a directory").join("logs");
        fs::create_dir_all(&logs).expect("a directory for logs");
        let (child, log) = spawn(&options.arguments(), &logs, prepare);
        Backend { child, log, options: options.clone() }
    }

    /// Waits until the backend answers on its control socket.
    pub(crate) fn wait_until_ready(&mut self) {
        let deadline = Instant::now() + START;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait for cairn-blk") {
                panic!("cairn-blk ended at its start with {status}:\n{}", self.log());
            }
            let answer =
                Control::connect(&self.options.control).and_then(|mut c| c.ask(&Request::Status));
            if let Ok(Event::Status(_)) = answer {
                return;
            }
            assert!(Instant::now() < deadline, "cairn-blk is not ready: {answer:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn device(&self, shape: Shape) -> Device {
        Device::connect(&self.options.socket, shape)
    }

    pub(crate) fn control(&self) -> Control {
        Control::connect(&self.options.control).expect("connect to the control socket")
    }

    /// The socket at which a guest's connections arrive.
    pub(crate) fn guest_socket(&self) -> PathBuf {
        PathBuf::from(format!("{}_{DEFAULT_PORT}", self.options.vsock.display()))
    }

    pub(crate) fn guest(&self) -> Control {
        Control::connect(&self.guest_socket()).expect("connect as the guest")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The most memory that the process has had, in bytes, with that of the guest.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.memory("VmHWM:")
    }

    /// A size of the process's memory, as the kernel reports it.
    pub(crate) fn memory(&self, field: &str) -> u64 {
        let status = read(Path::new(&format!("/proc/{}/status", self.pid())));
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        number.unwrap_or_else(|| panic!("no {field} in {status}")) << 10
    }

    pub(crate) fn log(&self) -> String {
        read(&self.log)
    }

    pub(crate) fn assert_alive(&mut self) {
        let ended = self.child.try_wait().expect("wait for cairn-blk");
        assert!(ended.is_none(), "cairn-blk ended with {}", ended.expect("it ended"));
    }

    /// Does something while the process is stopped. The kernel may still work for it.
    pub(crate) fn while_stopped(&self, something: impl FnOnce()) {
        sys::signal(&self.child, libc::SIGSTOP);
        sys::wait_until_stopped(&self.child);
        something();
        sys::signal(&self.child, libc::SIGCONT);
    }

    /// Stops the process as an operator does. It must end cleanly.
    pub(crate) fn terminate(mut self) {
        self.assert_alive();
        sys::signal(&self.child, libc::SIGTERM);
        match wait(&mut self.child, END) {
            Some(status) => assert_eq!(status.code(), Some(0), "after SIGTERM: {status}"),
            None => panic!("cairn-blk goes on after SIGTERM"),
        }
    }

    /// Stops the process as an operator does. It must end with an error. Returns its log.
    pub(crate) fn end_with_error(mut self) -> String {
        sys::signal(&self.child, libc::SIGTERM);
        match wait(&mut self.child, END) {
            Some(status) => assert!(!status.success(), "after SIGTERM: {status}"),
            None => panic!("cairn-blk goes on after SIGTERM"),
        }
        self.log()
    }

    /// Kills the process some time after it was asked to stop.
    pub(crate) fn kill_while_it_stops(self, after: Duration) {
        sys::signal(&self.child, libc::SIGTERM);
        std::thread::sleep(after);
        self.kill();
    }

    /// Kills the process.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("kill cairn-blk");
        self.child.wait().expect("wait for cairn-blk");
    }

    /// Kills the process, and removes what the end of the host would remove: everything on a tmpfs.
    pub(crate) fn kill_with_host(self) {
        let live = self.options.live.clone();
        self.kill();
        fs::remove_dir_all(live).expect("remove the live directory");
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let tail = log.len().saturating_sub(4000);
            let tail = (tail..).find(|&at| log.is_char_boundary(at)).unwrap_or(0);
            eprintln!("the end of cairn-blk's log:\n{}", &log[tail..]);
        }
    }
}
