#include "kernels/runtime/error_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace ballast {

namespace {

// An empty remedy means that each message of the code says what is needed or what to change.
constexpr std::array codes{
    CodeInfo{Code::bad_argument, "bad_argument", "An argument lies outside the range that the call accepts.", ""},
    CodeInfo{Code::wrong_dtype, "wrong_dtype", "A buffer has another number format than the operation needs.", ""},
    CodeInfo{Code::wrong_size, "wrong_size", "Two buffers that belong together have different sizes.", ""},
    CodeInfo{Code::unaligned, "unaligned", "An offset or an address is not a multiple of the required alignment.", ""},
    CodeInfo{Code::unsupported, "unsupported", "This combination of options or formats is not supported.", ""},
    CodeInfo{Code::bad_environment, "bad_environment", "An environment variable has an invalid value.",
             "Correct or unset the variable that the message names."},
    CodeInfo{Code::out_of_order, "out_of_order", "A call is not possible in the present state.", ""},
    CodeInfo{Code::newer_format, "newer_format",
             "A newer Ballast wrote the file, in a format that this version does not know.",
             "Use the version of Ballast that wrote it, or a newer one."},
    CodeInfo{
        Code::run_mismatch, "run_mismatch",
        "The run on the drives differs from the one that this job trains, or the ranks' directories do not belong "
        "together.",
        "Start the job with the model and the optimizer that began the run, where all of its records can be reached; or "
        "give the run another name. Nothing has been changed."},
    CodeInfo{
        Code::older_format, "older_format",
        "An older Ballast wrote the file, in a format that this version no longer reads.",
        "Resume with the version of Ballast that wrote it, and save a checkpoint there; or give the run another name."},
    CodeInfo{Code::internal, "internal", "Ballast has a bug: it broke one of its own rules.",
             "Report it with the whole message. The state on disk is not affected."},
    CodeInfo{Code::host_memory, "host_memory", "The host has too little memory.",
             "Lower the memory budget, choose a smaller state format or a lower tier, or raise the container's limit."},
    CodeInfo{Code::pinned_memory, "pinned_memory", "Host memory cannot be pinned for the GPU.",
             "Raise the memlock limit (`ulimit -l`; of a container: docker --ulimit memlock=-1)."},
    CodeInfo{Code::device_memory, "device_memory", "The GPU has too little memory.",
             "Move state to a lower tier, raise the stage, or lower the prefetch limit."},
    CodeInfo{Code::memory_budget, "memory_budget", "A memory budget of this run is used up.",
             "Raise the budget, or make the owners that the message names smaller."},
    CodeInfo{Code::no_cuda_build, "no_cuda_build", "This build of Ballast has no CUDA backend.",
             "Build again with nvcc on the PATH, or choose the CPU."},
    CodeInfo{Code::no_cuda_device, "no_cuda_device", "This process sees no usable GPU.",
             "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or choose the CPU."},
    CodeInfo{Code::no_cublas, "no_cublas", "The build or the process has no cuBLAS, which multiplies matrices on GPUs.",
             "Install the package nvidia-cublas, which a torch for CUDA brings, or put the toolkit's libraries on the "
             "path of the loader."},
    CodeInfo{Code::no_io_uring, "no_io_uring", "The kernel, the container or this build has no io_uring.",
             "No action is needed: threads read and write instead. To save CPU time, allow io_uring in the container."},
    CodeInfo{Code::drive_full, "drive_full", "A drive has too little free space.",
             "Free space on the drive, name another directory, or choose a smaller state format. Nothing is lost."},
    CodeInfo{Code::network_drive, "network_drive", "A directory for state lies on a network file system.",
             "Name a directory on a local drive. If the network file system is fast and reliable, allow network file "
             "systems."},
    CodeInfo{Code::directory_in_use, "directory_in_use", "Another process uses the directory of a run or a checkpoint.",
             "Wait for the process that the message names, or stop it, or use another directory."},
    CodeInfo{Code::no_file_locks, "no_file_locks", "A file system has no file locks.",
             "Mount it with locks (Lustre: `-o flock`; NFS: with its lock service), or use a directory elsewhere."},
    CodeInfo{Code::foreign_file, "foreign_file",
             "A file or directory to write to is a link, belongs to another user, or can be changed by all users.",
             "Remove it if no program needs it, or name a directory that only you can write to."},
    CodeInfo{Code::no_transport, "no_transport", "This build or this machine lacks a transport between ranks.",
             "Install what the message names and build again, or choose another transport."},
    CodeInfo{
        Code::system_limit, "system_limit",
        "The system refuses this process another thread, file descriptor or similar resource.",
        "Raise the limit that is reached (`ulimit`; of a container: docker --pids-limit, --ulimit), or run less in "
        "this process or container: fewer ranks, drives or data loader workers."},
    CodeInfo{Code::wrong_bits, "wrong_bits", "A repeated update, or a second look at its result, gave other bits.",
             "Write to parameters under torch.no_grad(), not through .data. If no code writes to them, memory, a "
             "processor or a GPU may be faulty: resume from an earlier checkpoint on another machine, and report it if "
             "it happens there."},
    CodeInfo{Code::cuda_call, "cuda_call", "A CUDA call failed.",
             "The message carries CUDA's own reason; an earlier kernel may be the cause."},
    CodeInfo{Code::file_call, "file_call", "A file operation failed.",
             "The message carries the system's own reason; check space, permissions and the drive's health."},
    CodeInfo{
        Code::bad_record, "bad_record", "A file has other bytes than were written, or breaks the rules of its format.",
        "No training step has used it. Of a run or a checkpoint of Ballast: resume from the last intact one, and check "
        "the drive. Of another program's file: get it again from its source, or use an earlier one."},
    CodeInfo{Code::peer_failed, "peer_failed", "Another rank failed, or left while this one needed it.",
             "Find out why that rank ended: it may have failed, or have had fewer batches than other ranks."},
    CodeInfo{
        Code::peer_late, "peer_late", "Another rank did not arrive within the timeout.",
        "Find out what that rank does: it is stopped, stuck, or much slower. If ranks wait for each other, look for code "
        "that depends on the rank. BALLAST_TIMEOUT sets the seconds."},
    CodeInfo{Code::no_meeting, "no_meeting", "The ranks of a job did not find each other.",
             "Start all ranks with the same world size, address and port, and each job with a port of its own."},
};

static_assert(std::ranges::is_sorted(codes, {}, &CodeInfo::code), "the table is searched and printed in numeric order");

std::string compose(Code code, const Problem& problem, Site site) {
  std::string text = fmt::format("{} {}", label(code), problem.what);
  const auto add = [&text](std::string_view part, std::string_view value) {
    if (!value.empty()) {
      text += fmt::format("\n  {:<11}{}", part, value);
    }
  };
  add("where:", problem.where);
  add("needed:", problem.needed);
  add("available:", problem.available);
  add("remedy:", problem.remedy.empty() ? describe(code).remedy : problem.remedy);
  add("raised at:", fmt::format("{}:{}", site.file, site.line));
  return text;
}

}  // namespace

std::span<const CodeInfo> all_codes() { return codes; }

const CodeInfo& describe(Code code) { return *std::ranges::lower_bound(codes, code, {}, &CodeInfo::code); }

std::string label(Code code) { return fmt::format("B{}", static_cast<int>(code)); }

Error::Error(Code code, const Problem& problem, Site site)
    : std::runtime_error(compose(code, problem, site)), code_(code), problem_(problem) {}

void fail(Code code, const Problem& problem, Site site) {
  switch (static_cast<int>(code) / 1000) {
    case 1: throw UsageError(code, problem, site);
    case 2: throw ResourceError(code, problem, site);
    default: throw FailureError(code, problem, site);
  }
}

}  // namespace ballast
