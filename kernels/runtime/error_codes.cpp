#include "kernels/runtime/error_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace ballast {
namespace {

constexpr std::array codes{
    CodeInfo{Code::bad_argument, "bad_argument", "A value lies outside what the call accepts.",
             "Change the argument that the message names."},
    CodeInfo{Code::wrong_dtype, "wrong_dtype", "A buffer holds another number format than the operation needs.",
             "Pass a buffer of the format that the message names, or cast it first."},
    CodeInfo{Code::wrong_size, "wrong_size", "Two buffers that belong together have different sizes.",
             "Pass buffers with the number of elements that the message names."},
    CodeInfo{Code::unaligned, "unaligned", "An offset or an address is not a multiple of what the operation needs.",
             "Start runs and quantization groups at the multiples that the message names."},
    CodeInfo{Code::unsupported, "unsupported", "The combination that was asked for does not exist.",
             "Choose one of the combinations that the message lists."},
    CodeInfo{Code::bad_environment, "bad_environment", "An environment variable has a value that cannot be read.",
             "Correct or unset the variable that the message names."},
    CodeInfo{Code::out_of_order, "out_of_order", "Calls came in an order in which they cannot be done.",
             "Make them in the order that the message names."},
    CodeInfo{Code::newer_format, "newer_format",
             "A file was written by a newer Ballast, in a format unknown to this one.",
             "Use the version of Ballast that wrote it, or a newer one."},
    CodeInfo{
        Code::run_mismatch, "run_mismatch",
        "The run on the drives is not the one that this job trains, or its ranks' directories do not belong together.",
        "Start the job with the model, ranks and options that began the run, or give the run another name. Nothing "
        "was changed."},
    CodeInfo{
        Code::older_format, "older_format",
        "A file was written by an older Ballast, in a format that this one does not read.",
        "Resume with the version of Ballast that wrote it, and save a checkpoint there; or give the run another name."},
    CodeInfo{Code::internal, "internal", "Ballast broke one of its own rules.",
             "Report it with the whole message; the state on disk is not affected."},
    CodeInfo{Code::host_memory, "host_memory", "The host has not enough memory.",
             "Lower the memory budget, choose a smaller state format or a lower tier, or raise the container's limit."},
    CodeInfo{Code::pinned_memory, "pinned_memory", "Host memory could not be pinned for the GPU.",
             "Raise the memlock limit (`ulimit -l`; of a container: docker --ulimit memlock=-1)."},
    CodeInfo{Code::device_memory, "device_memory", "The GPU has not enough memory.",
             "Move state to a lower tier, raise the stage, or lower the prefetch limit."},
    CodeInfo{Code::memory_budget, "memory_budget", "A memory budget that was set for this run is used up.",
             "Raise the budget, or make the owners that the message names smaller."},
    CodeInfo{Code::no_cuda_build, "no_cuda_build", "This build of Ballast has no CUDA backend.",
             "Build again with nvcc on the PATH, or ask for the CPU."},
    CodeInfo{Code::no_cuda_device, "no_cuda_device", "No usable GPU was found.",
             "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or ask for the CPU."},
    CodeInfo{
        Code::no_io_uring, "no_io_uring", "The kernel, the container or this build has no io_uring.",
        "Nothing needs to be done: threads read and write instead. For less CPU time allow io_uring in the container."},
    CodeInfo{Code::drive_full, "drive_full", "A drive has not enough free space.",
             "Free space on the drive, name another directory, or choose a smaller state format. Nothing was lost."},
    CodeInfo{
        Code::network_drive, "network_drive", "A directory for state lies on a network file system.",
        "Name a directory on a local drive, or allow network file systems if you know this one is fast and stays."},
    CodeInfo{Code::directory_in_use, "directory_in_use",
             "Another process works in the directory of a run or a checkpoint.",
             "Wait for the process that the message names, or stop it, or use another directory."},
    CodeInfo{Code::no_file_locks, "no_file_locks", "A file system has no file locks.",
             "Mount it with locks (Lustre: `-o flock`; NFS: with its lock service), or use a directory elsewhere."},
    CodeInfo{Code::no_transport, "no_transport", "This build or this machine lacks a way to carry bytes between ranks.",
             "Install what the message names and build again, or choose another way."},
    CodeInfo{
        Code::system_limit, "system_limit",
        "The system gives this process no more threads, file descriptors or other counted things.",
        "Raise the limit that is reached (`ulimit`; of a container: docker --pids-limit, --ulimit), or run less in "
        "this process or container: fewer ranks, drives or data loader workers."},
    CodeInfo{
        Code::wrong_bits, "wrong_bits",
        "An update was made again, or its result was looked at again, and had other bits.",
        "Write to parameters under torch.no_grad(), not through .data. If nobody did: memory, a processor or a GPU may "
        "be faulty here; go on from a checkpoint of before, on another machine, and report it if it happens there."},
    CodeInfo{Code::cuda_call, "cuda_call", "A CUDA call failed.",
             "The message carries CUDA's own reason; an earlier kernel may have caused it."},
    CodeInfo{Code::file_call, "file_call", "A file operation failed.",
             "The message carries the system's own reason; check space, permissions and the drive's health."},
    CodeInfo{Code::bad_record, "bad_record", "Bytes on a drive are not what was written there.",
             "Nothing was trained on them. Resume from the last intact generation, and check the drive."},
    CodeInfo{Code::peer_failed, "peer_failed", "Another rank failed, or left while this one needed it.",
             "Look at what ended that rank: its error, or fewer batches than other ranks have."},
    CodeInfo{Code::peer_late, "peer_late", "Another rank was not there within the timeout.",
             "Look what that rank does: it is stopped, stuck, or much slower. BALLAST_TIMEOUT sets the seconds."},
    CodeInfo{Code::no_meeting, "no_meeting", "The ranks of a job did not find each other.",
             "Start all ranks with the same world size, address and port, and each job with a port of its own."},
};

static_assert(std::ranges::is_sorted(codes, {}, &CodeInfo::code), "the table is searched and printed in numeric order");

}  // namespace

std::span<const CodeInfo> all_codes() { return codes; }

const CodeInfo& describe(Code code) { return *std::ranges::lower_bound(codes, code, {}, &CodeInfo::code); }

std::string label(Code code) { return fmt::format("B{}", static_cast<int>(code)); }

std::string codes_as_markdown() {
  std::string text =
      "# Error codes\n\n"
      "Made from `error_codes.cpp`; a test keeps the two equal. B1… the caller can mend, B2… the owner of the machine,\n"
      "B3… is a failure of hardware or of a peer.\n\n"
      "| code | name | meaning | what to do |\n|---|---|---|---|\n";
  for (const CodeInfo& info : codes) {
    text += fmt::format("| {} | `{}` | {} | {} |\n", label(info.code), info.name, info.meaning, info.remedy);
  }
  return text;
}

}  // namespace ballast
