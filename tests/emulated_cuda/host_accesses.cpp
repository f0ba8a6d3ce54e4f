#include "tests/emulated_cuda/host_accesses.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <map>
#include <mutex>

#include "tests/emulated_cuda/emulated.h"
#include "tests/emulated_cuda/pinned_memory.h"
#include "tests/emulated_cuda/rules.h"

// Pages take rights away from the host, and a fault tells of its access. A page may hold bytes that the host may access, too: it
// then gets its rights for one instruction. After a few of these it keeps them until the next work on this page, for speed.
namespace emulated {
namespace {

constexpr std::uintptr_t page = 4096;
constexpr unsigned most_instructions = 8;

struct Pages {
  std::uintptr_t first, end;
};
struct Kept {  // memory that the host is kept out of
  Access access;
  IssuedPtr work;
  Pages pages;
};
struct Works {  // the work that accesses a page
  unsigned reading = 0;
  unsigned writing = 0;
  unsigned instructions = 0;  // of the host, on other bytes of the page, since the last change
};

std::mutex
    mutex;  // guards the variables below; a thread that holds it accesses no pinned memory, because a fault takes it
auto& kept = never_destroyed<std::vector<Kept>>();
auto& pages = never_destroyed<std::map<std::uintptr_t, Works>>();
struct sigaction former {};  // what handled faults before

std::uintptr_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

int rights_of(std::uintptr_t number) {
  const auto found = pages.find(number);
  if (found == pages.end()) return PROT_READ | PROT_WRITE;
  return found->second.writing > 0 ? PROT_NONE : PROT_READ;
}

// Gives the pages of a range the rights that they should have.
void set_rights(std::uintptr_t first, std::uintptr_t end) {
  while (first < end) {
    const int rights = rights_of(first);
    std::uintptr_t until = first + 1;
    while (until < end && rights_of(until) == rights) {
      ++until;
    }
    ::mprotect(reinterpret_cast<void*>(first * page), (until - first) * page, rights);
    first = until;
  }
}

// A page that lies partly in the access counts if all of it is pinned: what else is there may be memory of the emulation itself.
Pages pages_of(const Access& access) {
  const auto [memory, bytes] = pinned_range_around(access.memory);
  const std::uintptr_t begin = number_of(access.memory), pinned = number_of(memory);
  const Pages all{(pinned + page - 1) / page, (pinned + bytes) / page};
#ifdef __x86_64__
  const Pages touched{begin / page, (begin + access.bytes + page - 1) / page};
#else  // an access cannot be told from its neighbours
  const Pages touched{(begin + page - 1) / page, (begin + access.bytes) / page};
#endif
  const std::uintptr_t first = std::max(all.first, touched.first);
  return {first, std::max(first, std::min(all.end, touched.end))};
}

void count_work(const Kept& one, unsigned change) {
  for (std::uintptr_t number = one.pages.first; number < one.pages.end; ++number) {
    Works& works = pages[number];
    (one.access.writes ? works.writing : works.reading) += change;
    works.instructions = 0;
    if (works.reading + works.writing == 0) pages.erase(number);
  }
  set_rights(one.pages.first, one.pages.end);
}

template <class Condition>
void let_host_in_if(Condition condition) {
  const std::lock_guard lock(mutex);
  std::erase_if(kept, [&](const Kept& each) {
    if (!condition(each)) return false;
    count_work(each, ~0u);
    return true;
  });
}

#ifdef __x86_64__
constexpr greg_t single_step = 0x100;           // of the flags: a trap follows each instruction
constexpr greg_t is_write = 2;                  // of the error code of a fault
thread_local std::vector<std::uintptr_t> lent;  // pages whose rights the running instruction has

bool does_write(const ucontext_t& at) { return (at.uc_mcontext.gregs[REG_ERR] & is_write) != 0; }

void lend(std::uintptr_t number, ucontext_t& to) {
  ::mprotect(reinterpret_cast<void*>(number * page), page, PROT_READ | PROT_WRITE);
  lent.push_back(number);
  to.uc_mcontext.gregs[REG_EFL] |= single_step;
}

void end_of_instruction(int, siginfo_t*, void* context) {
  const std::lock_guard lock(mutex);
  for (const std::uintptr_t number : lent) {
    const auto found = pages.find(number);
    if (found != pages.end() && ++found->second.instructions < most_instructions) set_rights(number, number + 1);
  }
  lent.clear();
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~single_step;
}
#else
bool does_write(const ucontext_t&) { return true; }
void lend(std::uintptr_t, ucontext_t&) {}
void end_of_instruction(int, siginfo_t*, void*) {}
#endif

void fault(int, siginfo_t* info, void* context) {
  auto& at = *static_cast<ucontext_t*>(context);
  const std::uintptr_t address = number_of(info->si_addr);
  if (!is_pinned(info->si_addr, 1)) {  // another fault: it comes again
    ::sigaction(SIGSEGV, &former, nullptr);
    return;
  }
  const std::lock_guard lock(mutex);
  for (const auto& [access, work, pages_of_access] : kept) {
    if (address - number_of(access.memory) >= access.bytes || (!access.writes && !does_write(at))) continue;
    broken("the host leaves pinned memory alone while work accesses it",
           "the host " + std::string(does_write(at) ? "writes" : "reads") + " byte " +
               std::to_string(address - number_of(access.memory)) + " of what " + described(*work, access) +
               ", and has not waited for it");
  }
  if (pages.contains(address / page)) lend(address / page, at);
}

// Catch2, Python and sanitizers set a handler of their own, some of them again and again.
void handle_faults() {
  struct sigaction now {};
  ::sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &fault) return;
  former = now;
  struct sigaction ours {};
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ours.sa_sigaction = &fault;
  ::sigaction(SIGSEGV, &ours, nullptr);
  ours.sa_sigaction = &end_of_instruction;
  ::sigaction(SIGTRAP, &ours, nullptr);
}

// The memory of this process as a file: rights of pages do not matter there.
int own_memory() {
  static const int file = ::open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  return file;
}

}  // namespace

void keep_host_out(const Access& access, const IssuedPtr& work) {
  if (access.bytes == 0) return;
  const Pages touched = pages_of(access);
  const std::lock_guard lock(mutex);
  handle_faults();
  kept.push_back({access, work, touched});
  count_work(kept.back(), 1);
}

void let_host_in(const Clock& ended) {
  let_host_in_if([&](const Kept& each) { return ended.of(each.work->stream) >= each.work->number; });
}

void let_host_into_unpinned(const void* memory, std::size_t bytes) {
  let_host_in_if([&](const Kept& each) { return number_of(each.access.memory) - number_of(memory) < bytes; });
}

void copy_in_work(void* to, const void* from, std::size_t bytes) {
  const auto offset = [](const void* address) { return static_cast<off_t>(number_of(address)); };
  const bool is_to_host = is_pinned(to, bytes), is_from_host = is_pinned(from, bytes);
  std::vector<std::byte> between(is_to_host && is_from_host ? bytes : 0);
  ssize_t copied = static_cast<ssize_t>(bytes);
  if (!is_to_host && !is_from_host) {
    std::memcpy(to, from, bytes);
  } else if (!is_to_host) {
    copied = ::pread(own_memory(), to, bytes, offset(from));
  } else if (!is_from_host) {
    copied = ::pwrite(own_memory(), from, bytes, offset(to));
  } else if (::pread(own_memory(), between.data(), bytes, offset(from)) == copied) {
    copied = ::pwrite(own_memory(), between.data(), bytes, offset(to));
  } else {
    copied = -1;
  }
  if (copied != static_cast<ssize_t>(bytes)) broken("a system with /proc/self/mem", "it cannot be read or written");
}

}  // namespace emulated
