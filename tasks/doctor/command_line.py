from tasks.common.command_line import CommandLine as CommandLine
