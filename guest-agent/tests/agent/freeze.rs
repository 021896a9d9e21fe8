//! A frozen file system is thawed, whatever happens to the agent and to the host.
//!
//! Each test mounts its own ext4 file system in a private mount namespace, so that no file system
//! of the machine is frozen. This needs root and loop devices. Without them the tests print a
//! message and pass.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::host::{AGENT, Host};

/// An ext4 file system that only processes started through [`Scratch::command`] can see.
struct Scratch {
    directory: TempDir,
    /// Keeps the namespace and its mount alive until its standard input closes.
    holder: Child,
}

impl Scratch {
    fn mount() -> Option<Scratch> {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        let target = directory.path().join("mnt");
        std::fs::create_dir(&target).unwrap();
        std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let formatted =
            Command::new("mke2fs").args(["-q", "-t", "ext4", "-F"]).arg(&image).status();
        if !formatted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: no mke2fs");
            return None;
        }
        let mut holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg("mount -o loop \"$0\" \"$1\" && echo mounted && exec cat")
            .args([&image, &target])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line != "mounted\n" {
            let _ = holder.wait();
            eprintln!("skipped: mounting needs root and loop devices");
            return None;
        }
        Some(Scratch { directory, holder })
    }

    fn target(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    /// A command that runs `program` in the mount namespace.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--mount").arg("--target").arg(self.holder.id().to_string()).arg(program);
        command
    }

    fn freezing_agent(&self, host: &Host, timeout: u32) -> Child {
        // Tests that run in the background of a shell may have inherited an ignored SIGINT.
        self.command("env")
            .args(["--default-signal=INT,TERM", AGENT])
            .arg("checkpoint")
            .arg("--freeze")
            .arg(self.target())
            .arg("--unix")
            .arg(host.socket())
            .args(["--timeout", &timeout.to_string()])
            // If the tests' own process group had a stopped member, the kernel would send SIGHUP to
            // the group when the parent of the tests ends.
            .process_group(0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Starts a write, which returns only while the file system is not frozen.
    fn write(&self) -> Write {
        let child = self.command("touch").arg(self.target().join("written")).spawn().unwrap();
        Write(child)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A failed test must not leave a frozen file system, which cannot be unmounted.
        let _ = self
            .command("fsfreeze")
            .arg("--unfreeze")
            .arg(self.target())
            .stderr(Stdio::null())
            .status();
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

struct Write(Child);

impl Write {
    fn done_within(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert!(status.success());
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn blocks(&mut self) -> bool {
        !self.done_within(Duration::from_millis(200))
    }
}

const SOON: Duration = Duration::from_secs(20);

fn signal(name: &str, process: &Child) {
    let id = process.id().to_string();
    assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
}

#[test]
fn the_file_system_is_thawed_when_the_answer_arrives() {
    let Some(scratch) = Scratch::mount() else { return };
    let host = Host::accepting("vm1");
    let output = scratch.freezing_agent(&host, 10).wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"vm1@7\n");
    let cairn_agent::Request::Checkpoint(checkpoint) = host.request() else { panic!() };
    assert_eq!(checkpoint.consistency, cairn_agent::Consistency::Filesystem);
    assert!(scratch.write().done_within(SOON));
}

#[test]
fn the_output_can_go_to_a_file_on_the_frozen_file_system() {
    let Some(scratch) = Scratch::mount() else { return };
    let host = Host::accepting("vm1");
    let status = scratch
        .command("sh")
        .arg("-c")
        .arg("exec \"$0\" checkpoint --freeze \"$1\" --unix \"$2\" > \"$1/answer\"")
        .arg(AGENT)
        .args([scratch.target(), host.socket()])
        .status()
        .unwrap();
    assert!(status.success());
    let answer = scratch.command("cat").arg(scratch.target().join("answer")).output().unwrap();
    assert_eq!(answer.stdout, b"vm1@7\n");
}

#[test]
fn a_host_that_never_answers_delays_writes_by_the_time_limit_at_most() {
    let Some(scratch) = Scratch::mount() else { return };
    let host = Host::silent();
    let agent = scratch.freezing_agent(&host, 5);
    host.request();
    let mut write = scratch.write();
    assert!(write.blocks(), "the file system is frozen while the agent waits");
    assert!(write.done_within(Duration::from_secs(12)));
    let output = agent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
}

#[test]
fn a_killed_agent_leaves_nothing_frozen() {
    for name in ["KILL", "TERM", "INT"] {
        let Some(scratch) = Scratch::mount() else { return };
        let host = Host::silent();
        let mut agent = scratch.freezing_agent(&host, 60);
        host.request();
        let mut write = scratch.write();
        assert!(write.blocks(), "the file system is frozen while the agent waits");
        signal(name, &agent);
        assert!(write.done_within(SOON), "still frozen after SIG{name}");
        agent.wait().unwrap();
    }
}

#[test]
fn nothing_stays_frozen_at_whatever_moment_the_agent_is_killed() {
    let Some(scratch) = Scratch::mount() else { return };
    let host = Host::silent();
    for delay in 0..40 {
        let mut agent = scratch.freezing_agent(&host, 60);
        thread::sleep(Duration::from_micros(500 * delay));
        agent.kill().unwrap();
        agent.wait().unwrap();
        assert!(scratch.write().done_within(SOON), "still frozen, killed after {delay}/2 ms");
    }
}

#[test]
fn a_stopped_agent_does_not_keep_the_file_system_frozen_beyond_the_time_limit() {
    let Some(scratch) = Scratch::mount() else { return };
    let host = Host::silent();
    let agent = scratch.freezing_agent(&host, 5);
    host.request();
    signal("STOP", &agent);
    let mut write = scratch.write();
    assert!(write.blocks(), "the file system is frozen while the agent is stopped");
    assert!(write.done_within(SOON));
    signal("CONT", &agent);
    let output = agent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{output:?}");
}

#[test]
fn a_freeze_of_another_program_is_respected() {
    let Some(scratch) = Scratch::mount() else { return };
    let fsfreeze = |action: &str, target: &Path| {
        scratch.command("fsfreeze").arg(action).arg(target).status().unwrap().success()
    };
    assert!(fsfreeze("--freeze", &scratch.target()));
    let host = Host::accepting("vm1");
    let output = scratch.freezing_agent(&host, 5).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("already frozen"));
    let mut write = scratch.write();
    assert!(write.blocks(), "the other program's freeze is still in force");
    assert!(fsfreeze("--unfreeze", &scratch.target()));
    assert!(write.done_within(SOON));
}

#[test]
fn a_thaw_by_another_program_before_the_answer_is_reported() {
    let Some(scratch) = Scratch::mount() else { return };
    let (released, release) = std::sync::mpsc::channel::<()>();
    let release = std::sync::Mutex::new(release);
    let host = Host::answering(move |_, stream| {
        let _ = release.lock().unwrap().recv_timeout(Duration::from_secs(10));
        crate::host::say(stream, &crate::host::accepted("vm1"));
    });
    let agent = scratch.freezing_agent(&host, 20);
    let mut write = scratch.write();
    let begin = Instant::now();
    while !write.blocks() {
        assert!(begin.elapsed() < Duration::from_secs(10), "the agent never froze");
        write = scratch.write();
    }
    let target = scratch.target();
    assert!(scratch.command("fsfreeze").arg("--unfreeze").arg(&target).status().unwrap().success());
    released.send(()).unwrap();
    let output = agent.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("crash-consistent"));
    assert!(write.done_within(SOON));
}
