#include "python/bindings/training_binding.h"

#include "zero/plan/compile.h"

namespace ballast::python {
namespace {

AgreeOnMemory agree_in_python(const TrainingBinding::AgreeOnMemoryInPython& agree) {
  return [&agree](const std::exception_ptr& failure) {
    agree(failure != nullptr);
    if (failure) std::rethrow_exception(failure);
  };
}

}  // namespace

TrainingBinding::TrainingBinding(Model model, py::object group, py::object norm_group, std::vector<optim::Rule> rules,
                                 TrainingOptions options)
    : group_(std::move(group)), norm_group_(std::move(norm_group)), gpu_(options.gpu) {
  for (const py::object& group : {group_, norm_group_}) {
    if (!group.is_none()) groups_.push_back(&group.cast<Group&>());
  }
  Communicator& world = groups_.front()->communicator();
  options.drives.log = &log_;
  if (groups_.size() > 1) options.norm_group = &groups_.back()->communicator();
  const py::gil_scoped_release released;
  training_ = std::make_unique<Training>(std::move(model), world, std::move(rules), options);
}

std::vector<std::pair<Level, std::string>> TrainingBinding::take_log() {
  const std::lock_guard lock(log_mutex_);
  return std::exchange(lines_, {});
}

// `fill` takes Python's lock itself.
void TrainingBinding::start(const Fill& fill) {
  const OneThread::Working working(thread_);
  training_->start([&](std::size_t unit, std::size_t tensor, Range range, const View& to) {
    fill(unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(to.data()));
  });
  count_steps();
}

void TrainingBinding::count_steps() const {
  for (const Group* group : groups_) {
    group->count_steps(training_->steps());
  }
}

void TrainingBinding::set_steps(std::uint64_t steps) {
  training_->set_steps(steps);
  count_steps();
}

void TrainingBinding::set_note(const std::string& note) { training_->set_note(std::as_bytes(std::span(note))); }

std::string TrainingBinding::note() const {
  const std::vector<std::byte>& note = training_->note();
  return {reinterpret_cast<const char*>(note.data()), note.size()};
}

std::vector<std::size_t> TrainingBinding::tensor_begins(std::size_t unit) const {
  return training_->plan().compiled().layout().units.at(unit).tensor_begin;
}

Memory TrainingBinding::full_parameters(std::size_t unit) {
  const View whole = training_->full_parameters(unit);
  return {whole.data(), whole.bytes(), gpu_, {}};
}

Memory TrainingBinding::acquire_parameters(std::size_t unit) {
  const OneThread::Working working(thread_);
  return acquire(training_->forward(unit));
}

Memory TrainingBinding::acquire_exact_parameters(std::size_t unit) {
  const OneThread::Working working(thread_);
  return acquire(training_->exact_parameters(unit));
}

bool TrainingBinding::gathers_codes() const { return training_->plan().compiled().input().gathers_codes(); }

Memory TrainingBinding::acquire(Lease lease) {
  lease_.emplace(std::move(lease));
  const ConstView acquired = lease_->parameters();
  return {const_cast<std::byte*>(acquired.data()),
          acquired.bytes(),
          gpu_,
          {}};  // torch has no tensors that can only be read
}

Memory TrainingBinding::acquire_gradients(std::size_t unit) {
  const OneThread::Working working(thread_);
  lease_.emplace(training_->backward(unit));
  const View acquired = lease_->gradients();
  return {acquired.data(), acquired.bytes(), gpu_, {}};
}

void TrainingBinding::release() {
  const OneThread::Working working(thread_);
  lease_.reset();
}

void TrainingBinding::visit_gradients(const ShowGradients& visit) {
  const OneThread::Working working(thread_);
  training_->visit_gradients([&](std::size_t unit, std::size_t tensor, const View& gradients, bool on_gpu) {
    visit(unit, tensor, {gradients.data(), gradients.bytes(), on_gpu ? gpu_ : std::nullopt, {}}, gradients.dtype());
  });
}

std::vector<TileToUpdate> TrainingBinding::shown(std::span<const SummedTile> tiles) const {
  std::vector<TileToUpdate> shown;
  shown.reserve(tiles.size());
  const auto memory = [&](const View& view, bool on_gpu) {
    return Memory{view.data(), view.bytes(), on_gpu ? gpu_ : std::nullopt, {}};
  };
  for (const SummedTile& tile : tiles) {
    TileToUpdate& shown_tile =
        shown.emplace_back(TileToUpdate{.unit = tile.unit,
                                        .first = tile.range.first,
                                        .gradients = memory(tile.gradients, tile.gradients_on_gpu),
                                        .gradient_dtype = tile.gradients.dtype(),
                                        .count = tile.range.count,
                                        .masters = memory(tile.masters, tile.masters_on_gpu)});
    for (std::size_t number = 0; number < tile.own.count; ++number) {
      const View values(reinterpret_cast<std::byte*>(tile.own.array(number)), tile.range.count, DType::fp32);
      shown_tile.own.push_back(memory(values, tile.masters_on_gpu));
    }
  }
  return shown;
}

// Rethrows what Python raises in the optimizer's own step, once; later calls can only report it.
StepResult TrainingBinding::step(const StepRequest& request) {
  const OneThread::Working working(thread_);
  std::exception_ptr raised;
  const auto custom_step = [&](const TilesToUpdate& turn) {
    try {
      request.custom_step(shown(turn.tiles), turn.gradient_factor, turn.is_last);
    } catch (const std::exception& error) {
      raised = std::current_exception();
      fail(Code::bad_argument, {.what = std::string("the optimizer's own step has failed: ") + error.what(),
                                .needed = "a step() that raises nothing"});
    }
  };
  try {
    StepResult result = training_->step({.groups = request.rules,
                                         .max_norm = request.max_norm,
                                         .loss_scale = request.loss_scale,
                                         .discard = request.discard,
                                         .missed = request.missed,
                                         .update = request.custom_step ? TrainerUpdate(custom_step) : TrainerUpdate()});
    count_steps();
    return result;
  } catch (const Error&) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

StepResult TrainingBinding::step_prepared() {
  const OneThread::Working working(thread_);
  StepResult result = training_->step_prepared();
  count_steps();
  return result;
}

void TrainingBinding::offload(bool parameters, const AgreeOnMemoryInPython& agree) {
  const OneThread::Working working(thread_);
  training_->offload(parameters, agree_in_python(agree));
}

void TrainingBinding::reload(const AgreeOnMemoryInPython& agree) {
  const OneThread::Working working(thread_);
  training_->reload(agree_in_python(agree));
}

std::string TrainingBinding::ledger(const std::pair<Tier, std::size_t>& own_state) const {
  Ledger ledger = training_->ledger();
  if (own_state.second > 0) ledger.push_back({own_state.first, "own state", own_state.second});
  return to_text(ledger);
}

std::string TrainingBinding::chrome_trace() {
  working([](Training& training) { training.finish(); });
  return training_->chrome_trace();
}

TrainingBinding::Parts TrainingBinding::parts(std::size_t unit, std::size_t tensor) const {
  Parts parts;
  for (const Range& range : state().local_ranges(unit, tensor)) {
    parts.emplace_back(range.first, range.count);
  }
  return parts;
}

void TrainingBinding::read_moment(std::size_t unit, std::size_t tensor, Moment moment, std::uintptr_t into) {
  const OneThread::Working working(thread_);
  state().read_moment(unit, tensor, moment, reinterpret_cast<float*>(into));
}

void TrainingBinding::write_moments(const MomentAddress& address) {
  const OneThread::Working working(thread_);
  state().write_moments([&](std::size_t unit, std::size_t tensor, Moment moment) {
    return reinterpret_cast<const float*>(address(unit, tensor, moment));
  });
}

void TrainingBinding::write_parameters(const Fill& fill) {
  const OneThread::Working working(thread_);
  state().write_parameters([&](std::size_t unit, std::size_t tensor, Range range, std::byte* into) {
    return fill(unit, tensor, range.first, range.count, reinterpret_cast<std::uintptr_t>(into));
  });
}

}  // namespace ballast::python
