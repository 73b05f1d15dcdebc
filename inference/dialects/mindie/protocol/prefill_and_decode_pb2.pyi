from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestId(_message.Message):
    __slots__ = ("reqId",)
    REQID_FIELD_NUMBER: _ClassVar[int]
    reqId: str
    def __init__(self, reqId: _Optional[str] = ...) -> None: ...

class DecodeRequestResponse(_message.Message):
    __slots__ = ("isValidDecodeParameters", "errorMessage")
    ISVALIDDECODEPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    ERRORMESSAGE_FIELD_NUMBER: _ClassVar[int]
    isValidDecodeParameters: bool
    errorMessage: str
    def __init__(self, isValidDecodeParameters: _Optional[bool] = ..., errorMessage: _Optional[str] = ...) -> None: ...

class BlockIds(_message.Message):
    __slots__ = ("blockId",)
    BLOCKID_FIELD_NUMBER: _ClassVar[int]
    blockId: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blockId: _Optional[_Iterable[int]] = ...) -> None: ...

class Temperature(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class TopK(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class TopP(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class TypicalP(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class DoSample(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class Seed(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class RepetitionPenalty(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class FrequencyPenalty(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class PresencyPenalty(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class LengthPenalty(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class StopTokenIds(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value: _Optional[_Iterable[int]] = ...) -> None: ...

class StopStrings(_message.Message):
    __slots__ = ("value", "list")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    value: str
    list: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, value: _Optional[str] = ..., list: _Optional[_Iterable[str]] = ...) -> None: ...

class SkipSpecialTokens(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class IncludeStopStrInOutput(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class IgnoreEos(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class EnableThinking(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class IsThinking(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bool
    def __init__(self, value: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "topK", "topP", "typicalP", "doSample", "seed", "repetitionPenalty", "watermark", "frequencyPenalty", "presencyPenalty", "lengthPenalty", "stopTokenIds", "stopStrings", "skipSpecialTokens", "includeStopStrInOutput", "ignoreEos", "logprobs", "topLogprobs", "enableThinking", "thinkingBudget", "responseFormat", "isThinking")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    TOPP_FIELD_NUMBER: _ClassVar[int]
    TYPICALP_FIELD_NUMBER: _ClassVar[int]
    DOSAMPLE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITIONPENALTY_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FREQUENCYPENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCYPENALTY_FIELD_NUMBER: _ClassVar[int]
    LENGTHPENALTY_FIELD_NUMBER: _ClassVar[int]
    STOPTOKENIDS_FIELD_NUMBER: _ClassVar[int]
    STOPSTRINGS_FIELD_NUMBER: _ClassVar[int]
    SKIPSPECIALTOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDESTOPSTRINOUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNOREEOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOPLOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENABLETHINKING_FIELD_NUMBER: _ClassVar[int]
    THINKINGBUDGET_FIELD_NUMBER: _ClassVar[int]
    RESPONSEFORMAT_FIELD_NUMBER: _ClassVar[int]
    ISTHINKING_FIELD_NUMBER: _ClassVar[int]
    temperature: Temperature
    topK: TopK
    topP: TopP
    typicalP: TypicalP
    doSample: DoSample
    seed: Seed
    repetitionPenalty: RepetitionPenalty
    watermark: Watermark
    frequencyPenalty: FrequencyPenalty
    presencyPenalty: PresencyPenalty
    lengthPenalty: LengthPenalty
    stopTokenIds: StopTokenIds
    stopStrings: StopStrings
    skipSpecialTokens: SkipSpecialTokens
    includeStopStrInOutput: IncludeStopStrInOutput
    ignoreEos: IgnoreEos
    logprobs: Logprobs
    topLogprobs: TopLogprobs
    enableThinking: EnableThinking
    thinkingBudget: ThinkingBudget
    responseFormat: str
    isThinking: IsThinking
    def __init__(self, temperature: _Optional[_Union[Temperature, _Mapping]] = ..., topK: _Optional[_Union[TopK, _Mapping]] = ..., topP: _Optional[_Union[TopP, _Mapping]] = ..., typicalP: _Optional[_Union[TypicalP, _Mapping]] = ..., doSample: _Optional[_Union[DoSample, _Mapping]] = ..., seed: _Optional[_Union[Seed, _Mapping]] = ..., repetitionPenalty: _Optional[_Union[RepetitionPenalty, _Mapping]] = ..., watermark: _Optional[_Union[Watermark, _Mapping]] = ..., frequencyPenalty: _Optional[_Union[FrequencyPenalty, _Mapping]] = ..., presencyPenalty: _Optional[_Union[PresencyPenalty, _Mapping]] = ..., lengthPenalty: _Optional[_Union[LengthPenalty, _Mapping]] = ..., stopTokenIds: _Optional[_Union[StopTokenIds, _Mapping]] = ..., stopStrings: _Optional[_Union[StopStrings, _Mapping]] = ..., skipSpecialTokens: _Optional[_Union[SkipSpecialTokens, _Mapping]] = ..., includeStopStrInOutput: _Optional[_Union[IncludeStopStrInOutput, _Mapping]] = ..., ignoreEos: _Optional[_Union[IgnoreEos, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., topLogprobs: _Optional[_Union[TopLogprobs, _Mapping]] = ..., enableThinking: _Optional[_Union[EnableThinking, _Mapping]] = ..., thinkingBudget: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., responseFormat: _Optional[str] = ..., isThinking: _Optional[_Union[IsThinking, _Mapping]] = ...) -> None: ...

class InferParams(_message.Message):
    __slots__ = ("priority", "timeout")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    priority: int
    timeout: int
    def __init__(self, priority: _Optional[int] = ..., timeout: _Optional[int] = ...) -> None: ...

class InputId(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class TextInput(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: str
    def __init__(self, value: _Optional[str] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("firstTokenCost", "lastTokenCost", "decodeTime", "batchSize", "queueWaitTime", "prefixCachedTokenNums", "callbackIndex")
    FIRSTTOKENCOST_FIELD_NUMBER: _ClassVar[int]
    LASTTOKENCOST_FIELD_NUMBER: _ClassVar[int]
    DECODETIME_FIELD_NUMBER: _ClassVar[int]
    BATCHSIZE_FIELD_NUMBER: _ClassVar[int]
    QUEUEWAITTIME_FIELD_NUMBER: _ClassVar[int]
    PREFIXCACHEDTOKENNUMS_FIELD_NUMBER: _ClassVar[int]
    CALLBACKINDEX_FIELD_NUMBER: _ClassVar[int]
    firstTokenCost: int
    lastTokenCost: int
    decodeTime: _containers.RepeatedScalarFieldContainer[int]
    batchSize: _containers.RepeatedScalarFieldContainer[int]
    queueWaitTime: _containers.RepeatedScalarFieldContainer[int]
    prefixCachedTokenNums: _containers.RepeatedScalarFieldContainer[int]
    callbackIndex: int
    def __init__(self, firstTokenCost: _Optional[int] = ..., lastTokenCost: _Optional[int] = ..., decodeTime: _Optional[_Iterable[int]] = ..., batchSize: _Optional[_Iterable[int]] = ..., queueWaitTime: _Optional[_Iterable[int]] = ..., prefixCachedTokenNums: _Optional[_Iterable[int]] = ..., callbackIndex: _Optional[int] = ...) -> None: ...

class DecodeParameters(_message.Message):
    __slots__ = ("reqId", "tokens", "firstToken", "msgType", "samplingParams", "inferParams", "inputId", "textInput", "isStream", "maxNewToken", "details", "returnFullText", "decoderInputDetails", "batchSize", "id", "truncate", "tools", "toolChoice", "loraId", "modelName", "metrics", "outputNames", "prevdecodeindex", "currentdecodeindex", "blockTable", "pNodeAddr", "pInstanceId", "e2eStartTime", "postsingletext", "dpInstanceIds", "useToolCall", "prefillTokenNum", "preOutputTokenNum", "kvSource")
    REQID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRSTTOKEN_FIELD_NUMBER: _ClassVar[int]
    MSGTYPE_FIELD_NUMBER: _ClassVar[int]
    SAMPLINGPARAMS_FIELD_NUMBER: _ClassVar[int]
    INFERPARAMS_FIELD_NUMBER: _ClassVar[int]
    INPUTID_FIELD_NUMBER: _ClassVar[int]
    TEXTINPUT_FIELD_NUMBER: _ClassVar[int]
    ISSTREAM_FIELD_NUMBER: _ClassVar[int]
    MAXNEWTOKEN_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETURNFULLTEXT_FIELD_NUMBER: _ClassVar[int]
    DECODERINPUTDETAILS_FIELD_NUMBER: _ClassVar[int]
    BATCHSIZE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOLCHOICE_FIELD_NUMBER: _ClassVar[int]
    LORAID_FIELD_NUMBER: _ClassVar[int]
    MODELNAME_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTNAMES_FIELD_NUMBER: _ClassVar[int]
    PREVDECODEINDEX_FIELD_NUMBER: _ClassVar[int]
    CURRENTDECODEINDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKTABLE_FIELD_NUMBER: _ClassVar[int]
    PNODEADDR_FIELD_NUMBER: _ClassVar[int]
    PINSTANCEID_FIELD_NUMBER: _ClassVar[int]
    E2ESTARTTIME_FIELD_NUMBER: _ClassVar[int]
    POSTSINGLETEXT_FIELD_NUMBER: _ClassVar[int]
    DPINSTANCEIDS_FIELD_NUMBER: _ClassVar[int]
    USETOOLCALL_FIELD_NUMBER: _ClassVar[int]
    PREFILLTOKENNUM_FIELD_NUMBER: _ClassVar[int]
    PREOUTPUTTOKENNUM_FIELD_NUMBER: _ClassVar[int]
    KVSOURCE_FIELD_NUMBER: _ClassVar[int]
    reqId: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    firstToken: _containers.RepeatedScalarFieldContainer[int]
    msgType: int
    samplingParams: SamplingParams
    inferParams: InferParams
    inputId: InputId
    textInput: TextInput
    isStream: bool
    maxNewToken: int
    details: bool
    returnFullText: bool
    decoderInputDetails: bool
    batchSize: int
    id: str
    truncate: int
    tools: str
    toolChoice: str
    loraId: str
    modelName: str
    metrics: Metrics
    outputNames: _containers.RepeatedScalarFieldContainer[str]
    prevdecodeindex: int
    currentdecodeindex: int
    blockTable: _containers.RepeatedCompositeFieldContainer[BlockIds]
    pNodeAddr: str
    pInstanceId: int
    e2eStartTime: int
    postsingletext: str
    dpInstanceIds: _containers.RepeatedScalarFieldContainer[int]
    useToolCall: bool
    prefillTokenNum: int
    preOutputTokenNum: int
    kvSource: str
    def __init__(self, reqId: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., firstToken: _Optional[_Iterable[int]] = ..., msgType: _Optional[int] = ..., samplingParams: _Optional[_Union[SamplingParams, _Mapping]] = ..., inferParams: _Optional[_Union[InferParams, _Mapping]] = ..., inputId: _Optional[_Union[InputId, _Mapping]] = ..., textInput: _Optional[_Union[TextInput, _Mapping]] = ..., isStream: _Optional[bool] = ..., maxNewToken: _Optional[int] = ..., details: _Optional[bool] = ..., returnFullText: _Optional[bool] = ..., decoderInputDetails: _Optional[bool] = ..., batchSize: _Optional[int] = ..., id: _Optional[str] = ..., truncate: _Optional[int] = ..., tools: _Optional[str] = ..., toolChoice: _Optional[str] = ..., loraId: _Optional[str] = ..., modelName: _Optional[str] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., outputNames: _Optional[_Iterable[str]] = ..., prevdecodeindex: _Optional[int] = ..., currentdecodeindex: _Optional[int] = ..., blockTable: _Optional[_Iterable[_Union[BlockIds, _Mapping]]] = ..., pNodeAddr: _Optional[str] = ..., pInstanceId: _Optional[int] = ..., e2eStartTime: _Optional[int] = ..., postsingletext: _Optional[str] = ..., dpInstanceIds: _Optional[_Iterable[int]] = ..., useToolCall: _Optional[bool] = ..., prefillTokenNum: _Optional[int] = ..., preOutputTokenNum: _Optional[int] = ..., kvSource: _Optional[str] = ...) -> None: ...
