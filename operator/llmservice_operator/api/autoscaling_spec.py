"""`spec.autoscaling` of an LLMService."""

from __future__ import annotations

from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import ConfigDict, Field, StringConstraints, field_validator

from llmservice_operator.api.schema_model import SchemaModel, rules
from llmservice_operator.api.units import Duration

TimeOfDay = Annotated[str, StringConstraints(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$", max_length=5)]
_A_STEP = rules(
    (
        "self.stepReplicas > 0 || self.stepPercent > 0",
        "stepReplicas and stepPercent can't both be 0: no replica could ever be added or removed",
    )
)


class ScaleUp(SchemaModel):
    model_config = ConfigDict(json_schema_extra=_A_STEP)

    stabilization: Duration = Field(
        "10s",
        description="Add only up to the lowest recommendation within this time. 0s: at once, as a burst or certain"
        " growth is answered in any case.",
    )
    step_replicas: int = Field(
        4, ge=0, le=1000, description="Add at most so many replicas in stepPeriod, or stepPercent where that is more."
    )
    step_percent: int = Field(
        100, ge=0, le=1000, description="Add at most this share of the replicas in stepPeriod, or stepReplicas."
    )
    step_period: Duration = Field("15s", description="The period of stepReplicas and stepPercent.")
    cooldown: Duration = Field("0s", description="Add none within this time of the last change, up or down.")


class ScaleDown(SchemaModel):
    model_config = ConfigDict(json_schema_extra=_A_STEP)

    stabilization: Duration | None = Field(
        None,
        description="Remove replicas only down to the highest recommendation within this time. Default: four times the"
        " start-up time that was learned, 120s to 300s; half of the surplus is removed after half a start.",
    )
    step_replicas: int = Field(
        0,
        ge=0,
        le=1000,
        description="Remove at most so many replicas in stepPeriod, or stepPercent where that is more.",
    )
    step_percent: int = Field(
        100, ge=0, le=100, description="Remove at most this share of the replicas in stepPeriod, or stepReplicas."
    )
    step_period: Duration = Field("15s", description="The period of stepReplicas and stepPercent.")
    cooldown: Duration = Field("0s", description="Remove none within this time of the last change, up or down.")


class MetricsSource(SchemaModel):
    source: Literal["auto", "prometheus", "pods"] = Field(
        "auto",
        description="Where signals are read: prometheus, the pods' own /metrics, or auto:"
        " Prometheus where the operator has one, the pods otherwise and while it is down.",
    )
    window: Duration = Field("60s", description="Time over which rates and p99 TTFT are computed.")


class ScheduledReplicas(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.start != self.end", "start and end must differ: for the whole day raise autoscaling.minReplicas"),
        )
    )

    days: list[Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]] = Field(
        default_factory=list, max_length=7, description="On which days it begins. Default: on all."
    )
    start: TimeOfDay = Field(description="When it begins, as HH:MM.")
    end: TimeOfDay = Field(description="When it ends, as HH:MM; before start: on the next day.")
    time_zone: str = Field(
        "UTC",
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$",
        description="The clock of start and end, by its IANA name such as Europe/Berlin.",
    )
    min_replicas: int = Field(ge=1, le=1000, description="Never fewer replicas than this meanwhile.")

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"{name} is no time zone: give an IANA name such as Europe/Berlin, or UTC") from error
        return name


class Autoscaling(SchemaModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
            (
                "!has(self.schedule) || self.schedule.all(one, one.minReplicas <= self.maxReplicas)",
                "schedule: minReplicas must not be above maxReplicas",
            ),
            (
                "!has(self.maxGPUHoursPerDay) || self.maxGPUHoursPerDay >= 24.0 * double(self.minReplicas)",
                "maxGPUHoursPerDay must be at least 24 for each of minReplicas, which run all day",
            ),
            (
                "!has(self.idleTimeout) || self.minReplicas == 0",
                "idleTimeout needs minReplicas: 0, for otherwise the last replica always stays",
            ),
        )
    )

    min_replicas: int = Field(
        1,
        ge=0,
        le=1000,
        description="Never fewer replicas than this. 0: the last one is removed after idleTimeout, and the next request"
        " to the gateway, which waits there, starts one.",
    )
    max_replicas: int = Field(ge=1, le=1000, description="Never more replicas than this.")
    idle_timeout: Duration | None = Field(
        None,
        description="With minReplicas: 0, how long no request runs, waits or arrives before the last replica is"
        " removed. Default: 300s, about what a start costs: so at most twice the least possible GPU time is spent.",
    )
    queue_depth: int = Field(4, ge=1, le=10000, description="Waiting requests per replica that are still fine.")
    tolerance_percent: int = Field(
        10,
        ge=0,
        le=100,
        description="How far the load may deviate from what the replicas hold before they are changed. Where demand and"
        " capacity are known, this is for fewer replicas alone, and soon after a removal for more as well.",
    )
    scale_up: ScaleUp = Field(default_factory=ScaleUp, description="How fast replicas are added.")
    scale_down: ScaleDown = Field(default_factory=ScaleDown, description="How fast replicas are removed.")
    batch: Literal["fill", "scale"] = Field(
        "fill",
        description="What requests of the batch lane ask for. fill: they use what others leave, and add no replicas."
        " scale: they count like the others.",
    )
    schedule: list[ScheduledReplicas] = Field(
        default_factory=list,
        max_length=16,
        description="Times of the day with a higher minReplicas, so that replicas are ready before a known load comes;"
        " where several apply, the highest counts.",
    )
    max_gpu_hours_per_day: float | None = Field(
        None,
        alias="maxGPUHoursPerDay",
        gt=0,
        le=1000000,
        description="GPU time that all replicas may take in a day of UTC. It includes minReplicas until midnight;"
        " there are further ones only while what is left lasts for an hour.",
    )
    metrics: MetricsSource = Field(default_factory=MetricsSource, description="Where the signals come from.")
