//! Offload and reload of params, gradients and states. docs/LIFECYCLE.md of the project has the
//! table of what is allowed when.

use std::ptr;

use hybridopt_sys as sys;

use crate::device::Stream;
use crate::error::{check, Result};
use crate::handle::Ticket;
use crate::keep::Keep;
use crate::optimizer::Optimizer;
use crate::param::ParamId;
use crate::queue::Queue;

/// What is moved, and the work after which it is moved. The default is all params, after the NULL
/// stream's work.
#[derive(Clone, Copy, Debug, Default)]
pub struct Move<'m> {
    /// Which params; None is all.
    pub params: Option<&'m [ParamId]>,
    /// The copies wait for the work that is on these streams now; at most 4, none is the NULL
    /// stream.
    pub streams: &'m [&'m Stream<'m>],
}

impl<'m> Move<'m> {
    /// These params only.
    pub fn of(params: &'m [ParamId]) -> Self {
        Move { params: Some(params), streams: &[] }
    }
}

type Call = unsafe extern "C" fn(
    sys::offload_optimizer_t,
    *const sys::offload_move_options_t,
    *mut sys::offload_ticket_t,
) -> i32;

/// The kind of address that the call gives up.
#[derive(Clone, Copy, PartialEq)]
enum GivesUp {
    Nothing,
    Data,
    Grad,
}

impl<'q, 'a> Queue<'q, 'a> {
    /// Copies params to the host and gives their addresses up; buffers that the optimizer owns are
    /// freed when the queue is done.
    pub fn offload_params(&mut self, what: &Move<'_>) -> Result<Ticket> {
        let ticket =
            self.move_resource(sys::offload_optimizer_offload_params, what, 0, GivesUp::Data)?;
        self.mark_offloaded(what, true);
        Ok(ticket)
    }

    /// Copies params back, to the addresses that `bind_data` has set.
    pub fn reload_params(&mut self, what: &Move<'_>) -> Result<Ticket> {
        let ticket =
            self.move_resource(sys::offload_optimizer_reload_params, what, 0, GivesUp::Nothing)?;
        self.mark_offloaded(what, false);
        Ok(ticket)
    }

    /// Copies gradients to the host. The next step reads them there and uses them up.
    pub fn offload_grads(&mut self, what: &Move<'_>) -> Result<Ticket> {
        self.move_resource(sys::offload_optimizer_offload_grads, what, 0, GivesUp::Grad)
    }

    /// Adds gradients, in fp32, to those on the host.
    pub fn accumulate_grads(&mut self, what: &Move<'_>) -> Result<Ticket> {
        let flags = sys::OFFLOAD_MOVE_ACCUMULATE;
        self.move_resource(sys::offload_optimizer_offload_grads, what, flags, GivesUp::Grad)
    }

    /// Drops gradients, wherever they are.
    pub fn drop_grads(&mut self, what: &Move<'_>) -> Result<Ticket> {
        let flags = sys::OFFLOAD_MOVE_DROP;
        self.move_resource(sys::offload_optimizer_offload_grads, what, flags, GivesUp::Grad)
    }

    /// Copies gradients back, to the addresses that `bind_grad` has set.
    pub fn reload_grads(&mut self, what: &Move<'_>) -> Result<Ticket> {
        self.move_resource(sys::offload_optimizer_reload_grads, what, 0, GivesUp::Nothing)
    }

    /// Copies the device share of masters and moments to the host. When all params' states are
    /// there, the library has no memory on the device.
    pub fn offload_states(&mut self, what: &Move<'_>) -> Result<Ticket> {
        self.move_resource(sys::offload_optimizer_offload_states, what, 0, GivesUp::Nothing)
    }

    /// Copies the device share back. Its memory is taken before this returns.
    pub fn reload_states(&mut self, what: &Move<'_>) -> Result<Ticket> {
        self.move_resource(sys::offload_optimizer_reload_states, what, 0, GivesUp::Nothing)
    }

    /// Makes masters follow params that other code has written. A master whose rounded value is the
    /// param does not change.
    pub fn refresh_masters(&mut self, what: &Move<'_>) -> Result<Ticket> {
        self.move_resource(sys::offload_optimizer_refresh_masters, what, 0, GivesUp::Nothing)
    }

    /// Changes how much state is on the device, from 0.0 (all on the host) to 1.0. If there is not
    /// enough memory, the call is refused and nothing has changed.
    pub fn set_device_fraction(&mut self, device_fraction: f64) -> Result<Ticket> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, and the ticket is written during the call.
        check(unsafe {
            sys::offload_optimizer_set_device_fraction(self.handle(), device_fraction, &mut ticket)
        })?;
        Ok(Ticket(ticket))
    }

    /// The same for the fraction on disk too, which needs directories ([`OptimizerOptions`]); `set_device_fraction`
    /// leaves it as it is.
    pub fn set_fractions(&mut self, device_fraction: f64, disk_fraction: f64) -> Result<Ticket> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, and the ticket is written during the call.
        check(unsafe {
            sys::offload_optimizer_set_fractions(
                self.handle(),
                device_fraction,
                disk_fraction,
                &mut ticket,
            )
        })?;
        Ok(Ticket(ticket))
    }

    /// Undoes early updates, and makes none before the next step has ended.
    pub fn undo_early_updates(&mut self) -> Result<Ticket> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, and the ticket is written during the call.
        check(unsafe { sys::offload_optimizer_undo_early_updates(self.handle(), &mut ticket) })?;
        Ok(Ticket(ticket))
    }

    fn move_resource(
        &mut self,
        call: Call,
        what: &Move<'_>,
        flags: u32,
        gives_up: GivesUp,
    ) -> Result<Ticket> {
        let ids: Option<Vec<u32>> =
            what.params.map(|params| params.iter().map(|id| id.0).collect());
        let streams: Vec<_> = what.streams.iter().map(|stream| stream.raw).collect();
        let options = sys::offload_move_options_t {
            flags,
            params: ids.as_ref().map_or(ptr::null(), |ids| ids.as_ptr()),
            param_count: ids.as_ref().map_or(0, |ids| ids.len() as u32),
            stream_count: streams.len() as u32,
            streams: streams.as_ptr(),
            ..Default::default()
        };
        let mut ticket = 0;
        // SAFETY: the handle is alive, the struct whole and what it points to as long as said.
        check(unsafe { call(self.handle(), &options, &mut ticket) })?;
        for index in self.indices(what) {
            let slot = &mut self.optimizer.slots[index];
            let given_up = match gives_up {
                GivesUp::Nothing => None,
                GivesUp::Grad => slot.grad.take(),
                // If the param is on the host already, the call has no effect and the address
                // stays.
                GivesUp::Data if slot.offloaded => None,
                GivesUp::Data => slot.data.take(),
            };
            self.optimizer.kept.extend(given_up.map(Keep::Memory));
        }
        Ok(Ticket(ticket))
    }

    fn mark_offloaded(&mut self, what: &Move<'_>, offloaded: bool) {
        for index in self.indices(what) {
            self.optimizer.slots[index].offloaded = offloaded;
        }
    }

    /// The call has accepted the ids, so they are good.
    fn indices(&self, what: &Move<'_>) -> Vec<usize> {
        match what.params {
            Some(ids) => ids.iter().map(|id| id.0 as usize).collect(),
            None => (0..self.optimizer.slots.len()).collect(),
        }
    }
}

/// The same calls; each returns when its work is done.
impl<'a> Optimizer<'a> {
    /// See [`Queue::offload_params`].
    pub fn offload_params(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.offload_params(what).map(drop))
    }

    /// See [`Queue::reload_params`].
    pub fn reload_params(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.reload_params(what).map(drop))
    }

    /// See [`Queue::offload_grads`].
    pub fn offload_grads(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.offload_grads(what).map(drop))
    }

    /// See [`Queue::accumulate_grads`].
    pub fn accumulate_grads(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.accumulate_grads(what).map(drop))
    }

    /// See [`Queue::drop_grads`].
    pub fn drop_grads(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.drop_grads(what).map(drop))
    }

    /// See [`Queue::reload_grads`].
    pub fn reload_grads(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.reload_grads(what).map(drop))
    }

    /// See [`Queue::offload_states`].
    pub fn offload_states(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.offload_states(what).map(drop))
    }

    /// See [`Queue::reload_states`].
    pub fn reload_states(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.reload_states(what).map(drop))
    }

    /// See [`Queue::set_device_fraction`].
    pub fn set_device_fraction(&mut self, device_fraction: f64) -> Result<()> {
        self.queue(|queue| queue.set_device_fraction(device_fraction).map(drop))
    }

    /// See [`Queue::set_fractions`].
    pub fn set_fractions(&mut self, device_fraction: f64, disk_fraction: f64) -> Result<()> {
        self.queue(|queue| queue.set_fractions(device_fraction, disk_fraction).map(drop))
    }

    /// See [`Queue::undo_early_updates`].
    pub fn undo_early_updates(&mut self) -> Result<()> {
        self.queue(|queue| queue.undo_early_updates().map(drop))
    }

    /// See [`Queue::refresh_masters`].
    pub fn refresh_masters(&mut self, what: &Move<'_>) -> Result<()> {
        self.queue(|queue| queue.refresh_masters(what).map(drop))
    }
}
