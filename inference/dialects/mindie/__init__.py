"""The EndPoint of Huawei's MindIE, byte for byte: its three planes, its five inference dialects, its flat errors."""
