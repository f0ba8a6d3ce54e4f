// Groups of ranks: connected through the environment of a launcher or a store of Python's, and left when the process ends.
#include "python/bindings/group.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "kernels/random_math.h"
#include "zero/comm/call.h"
#include "zero/comm/connect.h"
#include "zero/comm/deadline.h"
#include "zero/comm/message.h"
#include "zero/comm/on_all_ranks.h"

namespace ballast::python {

namespace {

struct OpenGroups {
  std::mutex mutex;
  std::set<OpenGroup*> groups;
};
OpenGroups& open_groups();

void say_goodbye(int exit_code, void*) {
  OpenGroups& open = open_groups();
  const std::lock_guard lock(open.mutex);
  for (OpenGroup* const group : open.groups) {
    if (group->is_of_this_process()) group->communicator().leave(group->farewell_of_process(exit_code));
  }
}

// Returns the groups, which are never freed, because they are used while the process ends.
OpenGroups& open_groups() {
  static auto* const all = [] {
    ::on_exit(say_goodbye, nullptr);  // glibc's, which unlike atexit() tells how the process ends
    return new OpenGroups;
  }();
  return *all;
}

}  // namespace

void OpenGroup::begin(std::unique_ptr<Communicator> communicator) {
  communicator_ = std::move(communicator);
  const std::lock_guard lock(open_groups().mutex);
  open_groups().groups.insert(this);
}

OpenGroup::~OpenGroup() {
  const std::lock_guard lock(open_groups().mutex);
  open_groups().groups.erase(this);
}

void OpenGroup::count_steps(std::uint64_t steps) {
  steps_ = steps;
  communicator_->set_activity(fmt::format("is in step {}", steps + 1));
}

std::string OpenGroup::after_steps() const {
  const std::uint64_t steps = steps_;
  return steps == no_optimizer ? "" : fmt::format(" after {} step{}", steps, steps == 1 ? "" : "s");
}

std::string OpenGroup::closing_words() const {
  return fmt::format("it closed its {}{}", steps_ == no_optimizer ? "group" : "optimizer", after_steps());
}

LeaveReason OpenGroup::farewell_of_process(int exit_code) const {
  const int code = exit_code & 0xFF;  // other processes see only this byte
  if (code == 0) return {.words = "it ended" + after_steps()};
  return {.words = fmt::format("it ended with exit code {}{}", code, after_steps()), .has_failed = true};
}

namespace {

std::string words_of(const py::error_already_set& error) {
  return fmt::format("{}: {}", error.type().attr("__name__").cast<std::string>(),
                     py::str(error.value()).cast<std::string>());
}

// A Python object with set(key, value), get(key) and wait(keys); torch.distributed.Store is one. Jobs of different names may
// share it. Only rank 0 sets, and the others wait for it.
class PythonStore : public KeyValueStore {
 public:
  PythonStore(py::object store, const std::string& job, std::chrono::milliseconds timeout)
      : store_(std::move(store)), prefix_(job + "/"), timeout_(timeout) {}

  void set(const std::string& key, const std::string& value) override {
    const py::gil_scoped_acquire held;
    store_.attr("set")(prefix_ + key, value);
  }

  std::string get(const std::string& key) override {
    const py::gil_scoped_acquire held;
    try {
      wait_for(prefix_ + key);
      return store_.attr("get")(prefix_ + key).cast<std::string>();  // bytes, or text
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // an interrupt
      fail(Code::no_meeting, {.what = "cannot find rank 0: its address is not in the store",
                              .available = words_of(error),
                              .remedy = "Look for an earlier error of rank 0, and give all ranks the same store."});
    }
  }

 private:
  // The stores of torch wait for a time of their own, unless they are told another one.
  void wait_for(const std::string& key) const {
    py::list keys;
    keys.append(key);
    if (!py::hasattr(store_, "set_timeout")) return static_cast<void>(store_.attr("wait")(keys));
    store_.attr("wait")(keys, timeout_);
  }

  py::object store_;
  std::string prefix_;
  std::chrono::milliseconds timeout_;
};

// True from the first of Python's own exit functions on.
std::atomic<bool> exit_has_begun = false;

// When a SystemExit leaves a function, Python frees the function's objects before the exit functions run, and with no
// caller left. Nothing else on the main thread does so.
bool main_thread_has_no_caller() {
  if (::getpid() != ::gettid()) return false;
  if (PyEval_GetFrame() == nullptr) return true;
  py::object first = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (!first.attr("f_back").is_none()) {
    first = first.attr("f_back");
  }
  return first.attr("f_code").attr("co_name").cast<std::string>() == "__del__";
}

bool python_is_ending() { return exit_has_begun || main_thread_has_no_caller(); }

// Counts this process's rendezvous of groups that a launcher's environment names. All ranks do them in the same order.
std::atomic<std::size_t> meetings = 0;

std::chrono::milliseconds milliseconds_of(double seconds) {
  const std::chrono::duration<double> longest = longest_timeout;
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::min(seconds, longest.count()) * 1e3));
}

// Whether the caller gives rank and size. Then a launcher's environment is not read, because it may be another group's.
bool is_told(const Rendezvous& where) { return where.rank && where.size; }

Launch launch_of(const Rendezvous& where) {
  Launch launch =
      is_told(where) ? Launch{.rank = *where.rank, .size = *where.size} : launch_from(Environment(), meetings);
  if (!where.host.empty()) launch.hub.host = where.host;
  if (!where.job.empty()) launch.job = where.job;
  return launch;
}

}  // namespace

Group::Group(const Rendezvous& where) : open_(std::make_unique<OpenGroup>()) {
  ConnectOptions options{.launch = launch_of(where)};
  std::optional<PythonStore> store;
  options.log = &open_->warnings();
  if (where.timeout) options.timeout = milliseconds_of(*where.timeout);
  if (!where.store.is_none()) {
    const std::chrono::milliseconds timeout = timeout_of(options, Environment());
    options.store = &store.emplace(where.store, options.launch->job, timeout);
  }
  const py::gil_scoped_release released;
  open_->begin(ballast::connect(options, {.backend = open_->backend(), .accounts = open_->accounts()}));
  rank_ = open_->communicator().rank();
  size_ = open_->communicator().size();
  if (!is_told(where)) ++meetings;  // only success counts: a rank that failed may try again
}

Communicator& Group::communicator() const {
  require(!is_closed_, Code::bad_argument, [] {
    return Problem{.what = "cannot use the group: it is closed", .remedy = "Use it inside of its `with` block."};
  });
  require(size_ == 1 || open_->is_of_this_process(), Code::bad_argument, [] {
    return Problem{.what = "cannot use the group: this process is a fork of a rank, and no rank itself",
                   .remedy = "Use the group in the process that has connected."};
  });
  return open_->communicator();
}

void Group::abort(const std::string& reason) const {
  Communicator& group = communicator();
  const py::gil_scoped_release released;
  group.abort(reason);
}

std::vector<std::size_t> Group::failed_ranks() const {
  return open_ == nullptr ? std::vector<std::size_t>() : open_->communicator().failed_ranks();
}

void Group::leave(const std::optional<LeaveReason>& leave_reason) {
  if (is_closed_ || !open_->is_of_this_process()) return;
  is_closed_ = true;
  const py::gil_scoped_release released;
  open_->communicator().leave(leave_reason.value_or(LeaveReason{.words = open_->closing_words()}));
}

void Group::free() {
  if (open_ == nullptr) return;
  const py::gil_scoped_release released;
  open_.reset();
}

Group::~Group() {
  if (open_ == nullptr) return;
  if (!open_->is_of_this_process() || python_is_ending()) {
    static_cast<void>(
        open_.release());  // a child has none of its threads; a process that ends needs it until it has ended
    return;
  }
  leave();
  free();
}

void Group::close() {
  if (open_ == nullptr || !open_->is_of_this_process()) return;
  is_closed_ = true;
  free();
}

namespace {

void bind_collectives(py::class_<Group>& type) {
  type.def("barrier", [](const Group& self) { self.working([](Communicator& group) { group.barrier(); }); })
      .def(
          "all_reduce",
          [](const Group& self, std::vector<std::int64_t> values) {
            self.working([&](Communicator& group) { group.all_reduce(values); });
            return values;
          },
          py::arg("values"))
      .def(
          "sum",
          [](const Group& self, std::uintptr_t mine, std::uintptr_t into, std::size_t count, WireFormat format,
             std::uint64_t step, std::uint64_t number) {
            const ConstView values(reinterpret_cast<const std::byte*>(mine), count, DType::fp32);
            const View sum(reinterpret_cast<std::byte*>(into), count, DType::fp32);
            self.working([&](Communicator& group) {
              if (format == WireFormat::exact) return group.all_reduce(values, sum);
              const auto bits = format == WireFormat::int8 ? kernels::CodeBits::eight : kernels::CodeBits::four;
              std::vector<std::byte> codes(kernels::encoded_all_reduce_bytes(count, group.size(), bits, bits));
              const Encoding encoding{.values = bits,
                                      .sums = bits,
                                      .stream = kernels::rounding_stream(kernels::seed_of_outer, number, step),
                                      .memory = View(codes.data(), codes.size(), DType::u8)};
              group.all_reduce(values, sum, encoding);
            });
          },
          py::arg("mine"), py::kw_only(), py::arg("into"), py::arg("count"),
          py::arg_v("format", WireFormat::exact, "WireFormat.exact"), py::arg("step") = 0, py::arg("number") = 0,
          "Add fp32 in host memory over the ranks. In codes, the values are rounded by random bits that step and number name: "
          "equal on all ranks, and others for each sum.")
      .def_property_readonly("sent_bytes",
                             [](const Group& group) {
                               const SentBytes sent = group.sent();
                               return std::pair(sent.inside, sent.across);
                             })
      .def(
          "from_all",
          [](const Group& self, const py::bytes& mine) {
            const std::string own = mine;
            std::vector<py::bytes> all;
            for (const std::string& text : self.working([&](Communicator& group) { return texts_of_all(group, own); }))
              all.emplace_back(text);
            return all;
          },
          py::arg("mine"))
      .def(
          "broadcast",
          [](const Group& self, std::uintptr_t address, std::size_t bytes, std::size_t root) {
            const View memory(reinterpret_cast<std::byte*>(address), bytes, DType::u8);
            self.working([&](Communicator& group) { group.broadcast(memory, root); });
          },
          py::kw_only(), py::arg("address"), py::arg("bytes"), py::arg("root"));
}

// Binds a function that all ranks call with facts of their own.
template <class Facts>
auto on_all(void (*compare)(Communicator& group, const Facts& mine)) {
  return [compare](const Group& self, const Facts& mine) {
    self.working([&](Communicator& group) { compare(group, mine); });
  };
}

}  // namespace

void bind_group(py::module_& module) {
  module.def(
      "launched_rank", [] { return launch_from(Environment()).rank; },
      "This process's, as its launcher's environment has it; 0 without one.");
  module.def("machine_name", this_machine, "The same for processes that can share memory, and for no others.");
  py::class_<Rendezvous>(module, "Rendezvous")
      .def(py::init<decltype(Rendezvous::store), std::optional<std::size_t>, std::optional<std::size_t>, std::string,
                    std::string, std::optional<double>>(),
           py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("host"), py::arg("job"),
           py::arg("timeout"));
  module.def(
      "begin_exit", [] { exit_has_begun = true; }, "From now on groups are left by the end of the process.");
  py::class_<Group> group(module, "Group");
  bind_collectives(group);
  group.def(py::init<const Rendezvous&>(), py::arg("where"))
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def("require_same_options", on_all(require_same_options), py::arg("mine"))
      .def("require_same_parameters", on_all(require_same_parameters), py::arg("mine"))
      .def("abort", &Group::abort, py::arg("reason"))
      .def_property_readonly("failed_ranks", &Group::failed_ranks)
      .def("leave",
           [](Group& group) {
             if (!python_is_ending()) group.leave();
           })
      .def(
          "fail",
          [](Group& group, const std::string& words) {
            group.leave(LeaveReason{words, true});
          },
          py::arg("words"))
      .def("close", &Group::close);
}

}  // namespace ballast::python
