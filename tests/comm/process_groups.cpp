#include "tests/comm/process_groups.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include "zero/comm/process_transport.h"

namespace ballast::testing {
namespace {

[[noreturn]] void run_child(std::size_t rank, int output, const std::function<void(std::size_t)>& body) {
  std::string failure;
  try {
    body(rank);
  } catch (const std::exception& thrown) {
    failure = thrown.what();
  }
  const bool told = ::write(output, failure.data(), failure.size()) == static_cast<ssize_t>(failure.size());
  ::_exit(told ? 0 : 1);
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> bytes{};
  for (ssize_t count = 0; (count = ::read(descriptor, bytes.data(), bytes.size())) > 0;) {
    text.append(bytes.data(), static_cast<std::size_t>(count));
  }
  return text;
}

}  // namespace

std::filesystem::path FileStore::path(std::string key) const {
  std::ranges::replace(key, '/', '-');
  return folder_ / key;
}

void FileStore::set(const std::string& key, const std::string& value) {
  const auto unfinished = path(key + ".new");
  std::ofstream(unfinished) << value;
  std::filesystem::rename(unfinished, path(key));
}

std::string FileStore::get(const std::string& key) {
  while (!std::filesystem::exists(path(key))) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::stringstream text;
  text << std::ifstream(path(key)).rdbuf();
  return text.str();
}

Processes::Processes(std::size_t size, const std::function<void(std::size_t)>& body) {
  std::cout.flush();  // the children would otherwise print it again
  for (std::size_t rank = 0; rank < size; ++rank) {
    int pipe[2];
    expect(::pipe(pipe) == 0, "no pipe");
    const pid_t child = ::fork();
    if (child == 0) run_child(rank, pipe[1], body);
    ::close(pipe[1]);
    children_.push_back({child, pipe[0]});
  }
}

Processes::~Processes() {
  for (std::size_t rank = 0; rank < size(); ++rank) {
    send(rank, SIGKILL);
    failure(rank);
  }
}

void Processes::send(std::size_t rank, int signal) const {
  if (children_[rank].pid <= 0) return;
  ::kill(children_[rank].pid, signal);
  if (signal == SIGSTOP) ::waitpid(children_[rank].pid, nullptr, WUNTRACED);  // all of its threads have stopped
}

std::string Processes::failure(std::size_t rank) {
  Child& child = children_[rank];
  if (child.pid <= 0) return "";
  std::string text = read_all(child.output);
  ::close(child.output);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  child.pid = 0;
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : text;
}

Failures Processes::failures() {
  Failures all;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    all.push_back(failure(rank));
  }
  return all;
}

std::vector<ProcessKind> process_kinds() {
  std::vector<ProcessKind> kinds{{"shared memory", HostTransport::shared_memory}};
  if (has_gloo()) kinds.push_back({"gloo", HostTransport::gloo});
  return kinds;
}

void ProcessGroupRig::as_rank(std::size_t rank, std::chrono::milliseconds timeout, const RankBody& body) const {
  const auto backend = kernels::cpu_backend({.threads = 1});
  MemoryAccounts accounts;
  FileStore store(folder_.path());
  body(*connect({.launch = Launch{.rank = rank, .size = shape_.size},
                 .store = &store,
                 .timeout = timeout,
                 .transport = transport_,
                 .ranks_per_host = shape_.ranks_per_host},
                {.backend = *backend, .accounts = accounts}));
}

}  // namespace ballast::testing
